from __future__ import annotations

from pathlib import Path

import pytest
from tests.packaging.tampering import edit_graph, flip

from trainload.core.errors import PackageError, StorageError
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.tensors.weight_shards import WeightReader

KINDS = [
    "manifest.json",
    "graphs/train.json",
    "graphs/eval.json",
    "graphs/update-matrices-first.json",
    "graphs/update-rest-following.json",
    "weights/model-00001-of-00003.safetensors",
    "weights/model-00002-of-00003.safetensors",
    "weights/non-persistent.safetensors",
    "weights/model.safetensors.index.json",
    "weights/chunks.json",
    "constants.safetensors",
    "assets/LICENSE",
    "debug/index.json",
    "debug/train.json",
]


def test_a_sound_package_has_no_problems_and_every_byte_is_read(packaged: Package) -> None:
    report = verify_package(packaged.path)
    files = [path for path in packaged.path.rglob("*") if path.is_file()]
    assert report.ok and report.problems == ()
    assert report.digest == packaged.digest
    assert (report.files, report.bytes) == (len(files), sum(path.stat().st_size for path in files))


@pytest.mark.parametrize("where", [0.0, 0.1, 0.35, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("file", KINDS)
def test_one_flipped_bit_is_found_and_its_file_named(copied: Path, file: str, where: float) -> None:
    flip(copied / file, int(where * ((copied / file).stat().st_size - 1)))
    report = verify_package(copied)
    assert not report.ok
    assert {problem.file for problem in report.problems} == {file}


def test_every_kind_of_file_is_tried(packaged: Package) -> None:
    folders = {
        path.relative_to(packaged.path).parent
        for path in packaged.path.rglob("*")
        if path.is_file()
    }
    assert {Path(kind).parent for kind in KINDS} == folders


@pytest.mark.parametrize(
    "file", [kind for kind in KINDS if not kind.startswith(("debug/", "assets/"))]
)
def test_one_flipped_bit_is_noticed_before_use(copied: Path, file: str) -> None:
    flip(copied / file, (copied / file).stat().st_size // 2)
    with pytest.raises(PackageError, match=file):
        _use(copied)


def _use(path: Path) -> None:
    package = open_package(path)
    package.updates()
    dict(package.program().state)


def test_an_asset_with_a_flipped_bit_is_not_given(copied: Path) -> None:
    flip(copied / "assets/LICENSE", 3)
    with pytest.raises(PackageError, match="assets/LICENSE"):
        open_package(copied).asset("LICENSE")


@pytest.mark.parametrize(
    "file",
    ["debug/extra.json", "graphs/extra.json", "derived/x/extra", "signatures/me.sig", "loose"],
)
def test_a_file_that_does_not_belong_is_named(copied: Path, file: str) -> None:
    (copied / file).parent.mkdir(parents=True, exist_ok=True)
    (copied / file).write_text("x")
    assert file in {problem.file for problem in verify_package(copied).problems}


@pytest.mark.parametrize(
    "file", [kind for kind in KINDS if kind not in ("manifest.json", "debug/index.json")]
)
def test_a_missing_file_is_named(copied: Path, file: str) -> None:
    (copied / file).unlink()
    assert [problem.file for problem in verify_package(copied).problems] == [file]


def test_a_package_without_debug_is_sound(copied: Path) -> None:
    for path in (copied / "debug").iterdir():
        path.unlink()
    (copied / "debug").rmdir()
    assert verify_package(copied).ok


def test_an_unsafe_graph_is_named_though_its_digest_is_right(copied: Path) -> None:
    edit_graph(
        copied, lambda graph: graph["graph_module"]["graph"]["nodes"][0].update(target="os.system")
    )
    assert [problem.file for problem in verify_package(copied).problems] == ["graphs/train.json"]


def test_verifying_leaves_the_package_as_it_was(copied: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    verify_package(copied)
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_nothing_to_verify_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no package"):
        verify_package(tmp_path / "nothing")


def test_a_checked_tensor_is_read_but_not_kept(packaged: Package) -> None:
    WeightReader(packaged.path, packaged.manifest).check("emb.weight")
