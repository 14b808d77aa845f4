"""Damaged or malicious stores: nothing in them becomes visible as a package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.places import Place

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.packaging.package import Package
from trainload.packaging.stores.pull import pull
from trainload.packaging.stores.push import push
from trainload.packaging.stores.releases import Release
from trainload.packaging.stores.store import blob_path

RECORD = "lines/main/releases/00000001.json"
POINTER = "lines/main/current/00000001.json"


@pytest.fixture
def published(packaged: Package, folder: Place) -> Path:
    """A store with one release."""
    push(packaged.path, folder.url)
    return Path(folder.url)


def edit(store: Path, change: Callable[[dict[str, Any]], None], record: str = RECORD) -> None:
    """Change a record, and recompute its checksum."""
    fields = json.loads((store / record).read_bytes())
    change(fields)
    fields.pop("checksum")
    (store / record).write_bytes(
        canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})
    )


def refused(store: Path, error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        pull(store, tmp_path / "pulled.tl")
    assert [path.name for path in tmp_path.iterdir() if path != store] == []


@pytest.mark.matrix("folder", "memory")
def test_a_bit_that_flipped_in_the_store_is_noticed(
    packaged: Package, place: Place, tmp_path: Path
) -> None:
    push(packaged.path, place.url, options=place.options)
    path = blob_path(packaged.manifest.files["weights/model-00001-of-00003.safetensors"].sha256)
    files = place.store().files
    data = bytearray(files.read(path, 10**6) or b"")
    data[-1] ^= 1
    files.replace(path, bytes(data))
    with pytest.raises(
        IntegrityError,
        match=(
            r"weights/model-00001-of-00003.safetensors: a fetched file differs from the"
            r" published one"
        ),
    ):
        pull(place.url, tmp_path / "pulled.tl", options=place.options)
    assert not list(tmp_path.glob("*.tl")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("size", [0, -1, 1], ids=["empty", "short", "long"])
def test_a_blob_of_another_size_is_noticed(
    published: Path, packaged: Package, tmp_path: Path, size: int
) -> None:
    blob = published / blob_path(packaged.manifest.files["graphs/train.json"].sha256)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] if size < 0 else data + b"x" if size else b"")
    if size == 1:  # bytes beyond the recorded size are never read
        assert pull(published, tmp_path / "pulled.tl").digest == packaged.digest
    else:
        refused(published, IntegrityError, "graphs/train.json: a fetched file", tmp_path)


def test_a_damaged_blob_is_sent_again_where_its_size_tells(
    published: Path, packaged: Package, tmp_path: Path
) -> None:
    blob = published / blob_path(packaged.manifest.files["graphs/train.json"].sha256)
    blob.write_bytes(blob.read_bytes()[:-1])
    assert push(packaged.path, published).sent_files == 1
    assert pull(published, tmp_path / "pulled.tl").digest == packaged.digest


@pytest.mark.parametrize("file", ["manifest.json", "graphs/train.json"])
def test_a_missing_blob_is_noticed(
    published: Path, packaged: Package, tmp_path: Path, file: str
) -> None:
    digest = packaged.digest if file == "manifest.json" else packaged.manifest.files[file].sha256
    (published / blob_path(digest)).unlink()
    refused(published, IntegrityError, "a file of the package is missing", tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_blob_that_is_no_plain_file_is_refused(
    published: Path, packaged: Package, tmp_path: Path, kind: str
) -> None:
    blob = published / blob_path(packaged.manifest.files["graphs/train.json"].sha256)
    blob.rename(published / "other")
    if kind == "link":
        blob.symlink_to(published / "other")
    else:
        os.mkfifo(blob)
    refused(
        published, UnsafePackageError, "link" if kind == "link" else "not a regular file", tmp_path
    )


FIELDS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path that leaves the folder": (
        lambda r: r["files"].update({"../evil": r["files"]["manifest.json"]}),
        "not a safe relative path",
    ),
    "an absolute path": (
        lambda r: r["files"].update({"/etc/evil": r["files"]["manifest.json"]}),
        "not a safe relative path",
    ),
    "a file that the manifest lacks": (
        lambda r: r["files"].update({"graphs/x.json": r["files"]["manifest.json"]}),
        "not match its manifest",
    ),
    "a derived graph": (
        lambda r: r["files"].update({"derived/x/step.json": r["files"]["manifest.json"]}),
        "cannot be part",
    ),
    "paths that differ in case": (
        lambda r: r["files"].update({"Debug/x": r["files"]["manifest.json"]}),
        "differ only in case",
    ),
    "no manifest": (lambda r: r["files"].pop("manifest.json"), "no manifest"),
    "a file less": (lambda r: r["files"].pop("graphs/train.json"), "do not match its manifest"),
    "another file's digest": (
        lambda r: r["files"]["graphs/train.json"].update(
            sha256=r["files"]["graphs/eval.json"]["sha256"]
        ),
        "do not match its manifest",
    ),
    "a huge size": (lambda r: r["files"]["manifest.json"].update(size=2**40), "too large"),
    "a digest that is a path": (
        lambda r: r["files"]["manifest.json"].update(sha256="../../../etc/passwd"),
        "sha256",
    ),
    "an unknown field": (lambda r: r.update(command="rm"), "command"),
    "a number that is none": (lambda r: r.update(created=float("1e300")), "created"),
    "another line": (lambda r: r.update(line="other"), "does not match its path"),
    "another number": (lambda r: r.update(id="00000002"), "does not match its path"),
}


@pytest.mark.parametrize(("change", "match"), FIELDS.values(), ids=FIELDS.keys())
def test_a_record_that_lies_is_refused(
    published: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    edit(published, change)
    refused(published, PackageError, match, tmp_path)


def test_a_record_whose_bits_flipped_is_refused(published: Path, tmp_path: Path) -> None:
    data = (published / RECORD).read_bytes()
    (published / RECORD).write_bytes(data.replace(b'"message":""', b'"message":"x"'))
    refused(published, IntegrityError, "its checksum does not match", tmp_path)


def test_a_pointer_to_no_release_is_refused(published: Path, tmp_path: Path) -> None:
    edit(published, lambda fields: fields.update(release="00000009"), POINTER)
    refused(published, StorageError, r"no such release \(expected one of 1, got 9\)", tmp_path)


def test_a_store_of_a_newer_format_is_refused(published: Path, tmp_path: Path) -> None:
    edit(published, lambda fields: fields.update(format_version=2), "store.json")
    refused(published, StorageError, r"newer format \(expected format 1, got format 2\)", tmp_path)


def test_a_record_that_is_too_large_is_not_read(published: Path, tmp_path: Path) -> None:
    with (published / RECORD).open("r+b") as file:
        file.truncate(2**33)
    refused(published, UnsafePackageError, "too large", tmp_path)


def test_a_record_reads_back_as_it_was(published: Path) -> None:
    data = (published / RECORD).read_bytes()
    assert Release.from_bytes(data, "x").to_bytes() == data


def test_a_local_file_that_is_damaged_is_not_used(
    published: Path, packaged: Package, tmp_path: Path
) -> None:
    (tmp_path / "packages").mkdir()
    older = pull(published, tmp_path / "packages/1.tl").path
    weights = older / "weights/model-00001-of-00003.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    report = pull(published, tmp_path / "packages/2.tl")
    assert report.fetched_bytes == weights.stat().st_size + (older / "manifest.json").stat().st_size
    assert (
        tmp_path / "packages/2.tl/weights/model-00001-of-00003.safetensors"
    ).read_bytes() != weights.read_bytes()
