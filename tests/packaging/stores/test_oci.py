"""Packages in a real registry on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.packaging.places import travelling
from tests.packaging.registry import registry_server
from tests.packaging.stores.test_stores import CHANGED, sizes

from trainload.cli import main as cli
from trainload.core.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.launching.node.fetching import fetched
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.stores import oci
from trainload.packaging.stores.oci import pin_oci, pull_oci, push_oci
from trainload.packaging.stores.oci_records import files_of

pytest.importorskip("oras", reason="oras is not installed: make env")

MODELPACK = "application/vnd.cncf.model."


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a registry."""
    with registry_server(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture
def name(registry: str, request: pytest.FixtureRequest) -> str:
    """A repository of the test's own, as HOST/NAME."""
    return f"{registry}/models/{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"


@pytest.fixture(scope="module")
def published(packaged: Package, registry: str) -> str:
    """A repository with the package at the tag v1, as HOST/NAME.

    No test changes this tag.
    """
    push_oci(packaged.path, f"oci://{registry}/models/published:v1", message="the first")
    return f"{registry}/models/published"


def manifest_of(name: str, tag: str) -> dict[str, Any]:
    host, _, repository = name.partition("/")
    answer = requests.get(
        f"http://{host}/v2/{repository}/manifests/{tag}",
        headers={"Accept": "application/vnd.oci.image.manifest.v1+json"},
        timeout=30,
    )
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def blob_of(name: str, digest: str) -> bytes:
    host, _, repository = name.partition("/")
    content: bytes = requests.get(
        f"http://{host}/v2/{repository}/blobs/{digest}", timeout=30
    ).content
    return content


def put_manifest(name: str, tag: str, manifest: dict[str, Any]) -> None:
    host, _, repository = name.partition("/")
    headers = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
    answer = requests.put(
        f"http://{host}/v2/{repository}/manifests/{tag}",
        data=json.dumps(manifest),
        headers=headers,
        timeout=30,
    )
    assert answer.status_code == 201, answer.text


def test_what_is_pulled_is_what_was_pushed(packaged: Package, name: str, tmp_path: Path) -> None:
    pushed = push_oci(packaged.path, f"oci://{name}:v1")
    pulled = pull_oci(f"oci://{name}:v1", tmp_path / "back.tl")
    assert travelling(tmp_path / "back.tl") == travelling(packaged.path)
    assert pulled.digest == packaged.digest == pushed.digest
    assert pulled.release == pushed.artifact
    assert verify_package(tmp_path / "back.tl").ok


def test_it_is_an_artifact_of_modelpack(published: str) -> None:
    manifest = manifest_of(published, "v1")
    assert manifest["artifactType"] == f"{MODELPACK}manifest.v1+json"
    assert manifest["config"]["mediaType"] == f"{MODELPACK}config.v1+json"
    types = {
        layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"].removeprefix(MODELPACK)
        for layer in manifest["layers"]
    }
    assert types["weights/model-00001-of-00003.safetensors"] == "weight.v1.raw"
    assert types["manifest.json"] == "weight.config.v1.raw"
    assert types["graphs/train.json"] == "code.v1.raw"
    assert types["assets/LICENSE"] == "doc.v1.raw"
    config = json.loads(blob_of(published, manifest["config"]["digest"]))
    assert config["config"] == {"format": "trainload", "paramSize": "224", "precision": "float32"}
    assert config["modelfs"] == {
        "type": "layers",
        "diffIds": [layer["digest"] for layer in manifest["layers"]],
    }
    assert manifest["annotations"]["org.opencontainers.image.description"] == "the first"


def test_the_same_package_is_the_same_artifact(packaged: Package, name: str) -> None:
    first, again = (
        push_oci(packaged.path, f"oci://{name}:v1"),
        push_oci(packaged.path, f"oci://{name}:v2"),
    )
    assert (first.artifact, first.sent_files) == (again.artifact, first.files)
    assert again.sent_bytes == 0


def test_oras_itself_pulls_the_package(packaged: Package, published: str, tmp_path: Path) -> None:
    from oras.client import OrasClient

    OrasClient(hostname=published.partition("/")[0], insecure=True).pull(
        target=f"{published}:v1", outdir=str(tmp_path / "pulled")
    )
    assert travelling(tmp_path / "pulled") == travelling(packaged.path)
    assert verify_package(tmp_path / "pulled").ok


@pytest.mark.slow
def test_an_artifact_can_be_pulled_by_its_digest(
    packaged: Package, second: Package, name: str, tmp_path: Path
) -> None:
    first = push_oci(packaged.path, f"oci://{name}:latest")
    push_oci(second.path, f"oci://{name}:latest")
    assert pull_oci(f"oci://{name}@{first.artifact}", tmp_path / "1.tl").digest == packaged.digest
    assert pull_oci(f"oci://{name}", tmp_path / "2.tl").digest == second.digest


def test_an_artifact_is_known_by_its_digest_before_it_is_fetched(
    packaged: Package, second: Package, name: str, tmp_path: Path
) -> None:
    first = push_oci(packaged.path, f"oci://{name}:v1")
    pinned = pin_oci(f"oci://{name}:v1")
    assert pinned == (f"oci://{name}:v1@{first.artifact}", packaged.digest)
    push_oci(second.path, f"oci://{name}:v1")
    assert pin_oci(f"oci://{name}:v1")[1] == second.digest
    folder = fetched(pinned[0], tmp_path / "cache", packaged.digest)
    assert travelling(folder) == travelling(packaged.path)
    with pytest.raises(IntegrityError, match="not the package that the run was launched with"):
        fetched(pinned[0], tmp_path / "cache", second.digest)


@pytest.mark.slow
def test_a_retrained_package_moves_only_what_changed(
    packaged: Package, second: Package, name: str, tmp_path: Path
) -> None:
    push_oci(packaged.path, f"oci://{name}:1")
    pull_oci(f"oci://{name}:1", tmp_path / "1.tl")
    pushed = push_oci(second.path, f"oci://{name}:2")
    pulled = pull_oci(f"oci://{name}:2", tmp_path / "2.tl")
    assert pushed.sent_bytes == pulled.fetched_bytes == sizes(second, *CHANGED)
    assert pushed.sent_bytes + pushed.present_bytes == pushed.bytes


def test_a_push_that_is_broken_off_shows_no_tag_and_goes_on(packaged: Package, name: str) -> None:
    def break_off(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push_oci(packaged.path, f"oci://{name}:v1", on_progress=break_off)
    with pytest.raises(AssertionError):
        manifest_of(name, "v1")
    assert push_oci(packaged.path, f"oci://{name}:v1").present_bytes > 0


def test_a_large_file_is_sent_and_received_in_blocks(
    packaged: Package, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "BLOCK", 4096)
    assert max(entry.size for entry in packaged.manifest.files.values()) > 3 * 4096
    push_oci(packaged.path, f"oci://{name}:v1")
    assert pull_oci(f"oci://{name}:v1", tmp_path / "back.tl").digest == packaged.digest


def test_a_file_that_is_not_what_the_manifest_says_is_not_taken(copied: Path, name: str) -> None:
    weights = copied / "weights/model-00002-of-00003.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(
        StorageError, match=r"model-00002-of-00003.safetensors: the registry rejected the request"
    ):
        push_oci(copied, f"oci://{name}:v1")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], type[Exception], str]] = {
    "another type": (
        lambda m: m.update(artifactType="application/x"),
        UnsafePackageError,
        "not an artifact of a model",
    ),
    "no type": (
        lambda m: m.pop("artifactType"),
        UnsafePackageError,
        "not an artifact of a package",
    ),
    "a path that leaves the folder": (
        lambda m: m["layers"][0]["annotations"].update({"org.cncf.model.filepath": "../../evil"}),
        UnsafePackageError,
        "not a safe relative path",
    ),
    "a layer without a path": (
        lambda m: m["layers"][0].pop("annotations"),
        UnsafePackageError,
        "not a safe relative path",
    ),
    "one path twice": (
        lambda m: m["layers"].append(m["layers"][0]),
        UnsafePackageError,
        "two layers have the same path",
    ),
    "a file less": (lambda m: m["layers"].pop(1), PackageError, "do not match its manifest"),
    "another size": (
        lambda m: m["layers"][-1].update(size=3),
        PackageError,
        "do not match its manifest",
    ),
    "no manifest": (
        lambda m: m.update(
            layers=[
                x
                for x in m["layers"]
                if x["annotations"]["org.cncf.model.filepath"] != "manifest.json"
            ]
        ),
        UnsafePackageError,
        "contains no package",
    ),
}


@pytest.mark.parametrize(("change", "error", "match"), CHANGES.values(), ids=CHANGES.keys())
def test_an_artifact_that_lies_is_refused(
    published: str,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    error: type[Exception],
    match: str,
) -> None:
    manifest = manifest_of(published, "v1")
    change(manifest)
    put_manifest(published, "lying", manifest)
    with pytest.raises(error, match=match):
        pull_oci(f"oci://{published}:lying", tmp_path / "back.tl")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_is_not_json_is_refused() -> None:
    for data in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(PackageError):
            files_of(data, "x")


def test_a_digest_that_does_not_fit_is_refused(published: str) -> None:
    place = oci._Repository(f"oci://{published}:v1", {})
    place.digest = "sha256:" + "0" * 64
    with pytest.raises(IntegrityError, match="the artifact's digest does not match"):
        place.manifest()


def test_no_such_artifact_is_a_clear_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such artifact"):
        pull_oci(f"oci://{name}:none", tmp_path / "back.tl")


def test_a_registry_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be reached"):
        pull_oci("oci://127.0.0.1:9/a/b:c", tmp_path / "back.tl")


@pytest.mark.parametrize(
    "reference",
    ["oci://", "oci://host", "oci://host/UPPER", "oci://host/a b", "oci://host/a:t@sha256:12"],
)
def test_a_reference_names_host_name_and_tag(reference: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not a reference to an artifact"):
        pull_oci(reference, tmp_path / "back.tl")


def test_the_commands_take_registries(
    packaged: Package, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["push", str(packaged.path), f"oci://{name}:v1", "--json"]) == 0
    pushed = json.loads(capsys.readouterr().out)
    assert (
        cli.run(
            [
                "pull",
                f"oci://{name}@{pushed['artifact']}",
                "-o",
                str(tmp_path / "back.tl"),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["digest"] == packaged.digest == pushed["digest"]


@pytest.mark.parametrize(
    "options", [["--line", "gpt"], ["--no-promote"], ["--reject", "worse"], ["--fact", "a=1"]]
)
def test_a_registry_has_no_lines(
    packaged: Package, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["push", str(packaged.path), "oci://127.0.0.1:9/a:b", *options]) == 2
    assert "an OCI registry has tags, but no lines" in capsys.readouterr().err
