"""assets/: additional files in a package."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.capture.jobs import Model
from tests.capture.jobs import job as small_job
from tests.packaging.jobs import Job
from tests.packaging.tampering import edit_manifest

import trainload
from trainload import passes
from trainload.capture.job.definition import Asset, AssetLike
from trainload.cli import main as cli
from trainload.core.errors import IntegrityError, PackageError, StorageError
from trainload.packaging.format.assets import media_type_of, role_of
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.write import with_weights, write_package

Write = Callable[..., Package]


@pytest.fixture
def write(job: Job, tmp_path: Path) -> Write:
    """A function that writes the package of `job` with some assets."""

    def write(assets: dict[str, AssetLike], name: str = "a.tl") -> Package:
        return write_package(tmp_path / name, job.program, job.updates, job.recipe, assets=assets)

    return write


@pytest.fixture(scope="module")
def rich(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A package with assets of every kind. No test changes it."""
    folder = tmp_path_factory.mktemp("rich")
    (folder / "words/deep").mkdir(parents=True)
    (folder / "words/vocab.json").write_text("{}")
    (folder / "words/deep/merges.txt").write_text("a b\n")
    assets: dict[str, AssetLike] = {
        "tokenizer": folder / "words",
        "LICENSE": b"as you like\n",
        "README.md": b"# A card\n",
        "labels.json": b'["cat","dog"]',
        "voices.bin": Asset(b"\x00\xff\xfe", "audio/basic"),
    }
    return write_package(folder / "rich.tl", job.program, job.updates, job.recipe, assets=assets)


def test_assets_are_listed_with_role_media_type_and_size(rich: Package) -> None:
    assert [(asset.name, asset.role, asset.media_type, asset.size) for asset in rich.assets] == [
        ("LICENSE", "licence", "text/plain", 12),
        ("README.md", "model card", "text/markdown", 9),
        ("labels.json", "label map", "application/json", 13),
        ("tokenizer/deep/merges.txt", "tokenizer", "text/plain", 4),
        ("tokenizer/vocab.json", "tokenizer", "application/json", 2),
        ("voices.bin", "", "audio/basic", 3),
    ]


def test_a_package_with_assets_in_folders_is_whole(rich: Package) -> None:
    assert verify_package(rich.path).problems == ()
    assert rich.asset("tokenizer/deep/merges.txt") == b"a b\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LICENSE", "text/plain"),
        ("a/NOTICE", "text/plain"),
        ("card.MD", "text/markdown"),
        ("x.tar.gz", "application/gzip"),
        ("model", "application/octet-stream"),
        ("spiece.model", "application/octet-stream"),
    ],
)
def test_a_media_type_follows_from_the_name(name: str, expected: str) -> None:
    assert media_type_of(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LICENCE.txt", "licence"),
        ("LICENSE-MIT", "licence"),
        ("docs/LICENSE", ""),
        ("model_card.md", "model card"),
        ("id2label.json", "label map"),
        ("tokenizer.model", "tokenizer"),
        ("generation_config.json", "configuration"),
        ("tokenizer_config.json", "tokenizer"),
        ("weights.bin", ""),
    ],
)
def test_a_role_follows_from_the_name(name: str, expected: str) -> None:
    assert role_of(name) == expected


def test_the_same_assets_give_the_same_digest_wherever_they_come_from(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f/b.txt").write_bytes(b"b")
    (tmp_path / "f/a.txt").write_bytes(b"a")
    first = write({"f": tmp_path / "f"}, "1.tl")
    second = write({"f/b.txt": b"b", "f/a.txt": str(tmp_path / "f/a.txt")}, "2.tl")
    assert first.digest == second.digest


def test_a_media_type_is_part_of_the_identity(write: Write) -> None:
    assert (
        write({"a": b"x"}, "1.tl").digest != write({"a": Asset(b"x", "text/plain")}, "2.tl").digest
    )


@pytest.mark.parametrize(
    ("assets", "problem"),
    [
        ({"../LICENSE": b""}, "an asset's name is not allowed in a package"),
        ({"/etc/passwd": b""}, "an asset's name is not allowed"),
        ({".hidden": b""}, "an asset's name is not allowed"),
        ({"con": b""}, "an asset's name is not allowed"),
        ({"a//b": b""}, "an asset's name is not allowed"),
        ({"": b""}, "an asset's name is not allowed"),
        ({"LICENSE": b"", "licence/..": b""}, "an asset's name is not allowed"),
        ({"a.txt": b"", "A.txt": b""}, "two assets have one name"),
        ({"a": Asset(b"", "text")}, "this is not a media type"),
        ({"a": Asset(b"", "text/plain\x1b[31m")}, "this is not a media type"),
        ({"a": "no/such/file"}, "an asset is neither a file nor a folder"),
    ],
)
def test_what_is_wrong_with_an_asset_is_said(
    write: Write, assets: dict[str, AssetLike], problem: str, tmp_path: Path
) -> None:
    with pytest.raises((PackageError, StorageError), match=problem):
        write(assets)
    assert list(tmp_path.iterdir()) == []


def test_names_of_a_file_and_a_folder_may_not_differ_in_case_only(
    write: Write, tmp_path: Path
) -> None:
    with pytest.raises(PackageError, match="case"):
        write({"Words/a": b"", "words/b": b""})
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="an asset is an empty folder"):
        write({"empty": tmp_path / "empty"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0)
    with pytest.raises(StorageError, match="an asset cannot be read"):
        write({"secret": tmp_path / "secret"})


def test_a_wrong_asset_is_refused_before_the_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(*_: object) -> None:
        raise AssertionError("the model was captured first")

    monkeypatch.setattr("trainload.freezing.freeze.prove", works)
    with pytest.raises(StorageError, match="an asset is neither a file"):
        trainload.freeze(
            small_job(Model(), assets={"LICENSE": str(tmp_path / "none")}), tmp_path / "a.tl"
        )


def test_links_in_a_folder_are_copied_as_files(write: Write, tmp_path: Path) -> None:
    """Hugging Face's cache consists of links."""
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blob").write_bytes(b"words")
    (tmp_path / "snapshot/vocab.txt").symlink_to(tmp_path / "blob")
    package = write({"tokenizer": tmp_path / "snapshot"})
    assert not (package.path / "assets/tokenizer/vocab.txt").is_symlink()
    assert package.asset("tokenizer/vocab.txt") == b"words"


def told(package: Package) -> list[tuple[str, str, str]]:
    return [(asset.name, asset.media_type, asset.sha256) for asset in package.assets]


def test_training_keeps_assets_and_their_media_types(rich: Package, tmp_path: Path) -> None:
    state = {name: rich.weights.tensor(name) for name in rich.weights.names()}
    trained = with_weights(
        rich, tmp_path / "trained.tl", ((name, value) for name, value in state.items())
    )
    assert told(trained) == told(rich)
    assert verify_package(trained.path).problems == ()


@pytest.mark.slow
def test_a_pass_keeps_assets_and_their_media_types(rich: Package, tmp_path: Path) -> None:
    made = trainload.transform(rich, [passes.eliminate_dead_code], tmp_path / "b.tl")
    assert told(made) == told(rich)


def test_an_asset_of_any_size_is_given_out(rich: Package, tmp_path: Path) -> None:
    (written,) = rich.save_asset("LICENSE", tmp_path / "terms")
    assert (written.name, (tmp_path / "terms").read_bytes()) == ("LICENSE", b"as you like\n")


def test_a_folder_of_assets_is_given_out(rich: Package, tmp_path: Path) -> None:
    rich.save_asset("tokenizer", tmp_path / "words")
    files = {
        path.relative_to(tmp_path / "words").as_posix(): path.read_bytes()
        for path in (tmp_path / "words").rglob("*.*")
    }
    assert files == {"deep/merges.txt": b"a b\n", "vocab.json": b"{}"}


def test_all_assets_are_given_out(rich: Package, tmp_path: Path) -> None:
    assert rich.save_asset("", tmp_path / "all") == rich.assets
    assert (tmp_path / "all/voices.bin").read_bytes() == b"\x00\xff\xfe"


def test_an_asset_that_there_is_not_is_missed_with_those_that_there_are(
    rich: Package, tmp_path: Path
) -> None:
    for missed in (
        lambda: rich.asset("LICENCE"),
        lambda: rich.save_asset("LICENCE", tmp_path / "x"),
    ):
        with pytest.raises(StorageError, match=r"no such asset\. It has: LICENSE"):
            missed()


def test_a_damaged_asset_is_not_given_out(rich: Package, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(rich.path, tmp_path / "copy.tl")
    (tmp_path / "copy.tl/assets/LICENSE").write_bytes(b"as we like!\n")
    with pytest.raises(IntegrityError, match="assets/LICENSE"):
        open_package(tmp_path / "copy.tl").save_asset("LICENSE", tmp_path / "terms")
    assert [path.name for path in tmp_path.iterdir()] == ["copy.tl"]


def test_a_path_that_is_taken_is_not_written_over(rich: Package, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    for name in ("LICENSE", "tokenizer"):
        with pytest.raises(StorageError, match="the path already exists"):
            rich.save_asset(name, tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "media_type", ["x", "text/plain\n", "text/\x1b[2J", "text/plain; charset=utf-8; q=1", ""]
)
def test_a_manifest_with_a_media_type_that_is_none_is_refused(
    copied: Path, media_type: str
) -> None:
    edit_manifest(copied, lambda m: m["files"]["assets/LICENSE"].update(media_type=media_type))
    with pytest.raises(PackageError, match="media_type"):
        open_package(copied)


def test_a_media_type_may_have_a_charset(copied: Path) -> None:
    edit_manifest(
        copied,
        lambda m: m["files"]["assets/LICENSE"].update(media_type="text/plain; charset=utf-8"),
    )
    assert open_package(copied).assets[0].media_type == "text/plain; charset=utf-8"


def test_inspect_lists_assets(rich: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(rich.path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "asset LICENSE text/plain, 12 bytes, licence" in text
    assert "asset voices.bin audio/basic, 3 bytes" in text


def test_inspect_lists_assets_as_json(rich: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(rich.path), "--json"]) == 0
    assets = json.loads(capsys.readouterr().out)["assets"]
    assert assets[1] == dataclasses.asdict(rich.assets[1])


def test_inspect_gives_an_asset_to_stdout(
    rich: Package, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert cli.run(["inspect", str(rich.path), "--asset", "voices.bin"]) == 0
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == b"\x00\xff\xfe"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("LICENSE", "text", "as you like\n"), ("voices.bin", "base64", "AP/+")],
)
def test_inspect_gives_an_asset_as_json(
    rich: Package, name: str, key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(rich.path), "--asset", name, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["asset"]["name"], printed[key]) == (name, value)


def test_inspect_writes_assets_to_a_path(rich: Package, tmp_path: Path) -> None:
    assert (
        cli.run(["inspect", str(rich.path), "--asset", "tokenizer", "-o", str(tmp_path / "words")])
        == 0
    )
    assert (tmp_path / "words/vocab.json").read_bytes() == b"{}"


def test_inspect_wants_an_asset_for_its_output(
    rich: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(rich.path), "-o", str(tmp_path / "x")]) == 2
    assert "pass --asset" in capsys.readouterr().err


JOB = """
import torch
import trainload


def job():
    torch.manual_seed(0)
    return trainload.Job(
        model=torch.nn.Linear(2, 1),
        batch={"input": torch.randn(2, 2)},
        loss=lambda model, batch: model(batch["input"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        assets={"LICENSE": b"the job's", "b.txt": b"b"},
    )
"""


def test_freeze_adds_assets_to_those_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "asset_job.py").write_text(JOB)
    (tmp_path / "terms").write_text("the caller's")
    given = ["--asset", "LICENSE=terms", "--asset", "terms.bin:text/plain=terms"]
    assert cli.run(["freeze", "asset_job.py:job", "-o", "a.tl", *given]) == 0
    package = open_package(Path("a.tl"))
    assert package.asset("LICENSE") == b"the caller's"
    assert [(asset.name, asset.media_type) for asset in package.assets] == [
        ("LICENSE", "text/plain"),
        ("b.txt", "text/plain"),
        ("terms.bin", "text/plain"),
    ]


@pytest.mark.parametrize("text", ["LICENSE", "=terms", "LICENSE="])
def test_freeze_refuses_an_asset_without_a_name_or_a_path(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "asset_job.py").write_text(JOB)
    assert cli.run(["freeze", "asset_job.py:job", "-o", "a.tl", "--asset", text]) == 2
    assert "expected NAME=PATH" in capsys.readouterr().err


def test_a_manifest_reads_back_as_it_was(rich: Package) -> None:
    data = (rich.path / "manifest.json").read_bytes()
    assert Manifest.from_bytes(data, "m").to_bytes() == data
