"""Folders of builds: build.json, the compiled graphs, and signatures/.

build.json                   the record (`BuildRecord`)
0/index.json, 0/*.bin        graphs of the ranks with index 0 on the pipeline axis,
0/kernels/*.so               their CPU kernels,
0/verified/*.json            and their comparisons with the interpreted graphs
1/...                        those of the next index
signatures/NAME.sig          signatures, as in a package
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from trainload.core.canonical_json import sha256_bytes, sha256_file
from trainload.core.errors import IntegrityError, StorageError
from trainload.core.paths import open_inside, write_bytes
from trainload.core.records import MAX_RECORD
from trainload.packaging.builds.build_record import BUILD_FILE, BuildRecord
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_files import copy_checked, new_folder, walk
from trainload.packaging.format.package_paths import SIGNATURES

_MEDIA_TYPES = {".json": "application/json"}
_ANY_TYPE = "application/octet-stream"


def file_entries(parts: Mapping[int, Path]) -> dict[str, FileEntry]:
    """Return path -> entry of the files of a build.

    Args:
        parts: index on the pipeline axis -> folder with its graphs.
    """
    return {
        f"{index}/{path}": FileEntry(
            media_type=_MEDIA_TYPES.get(Path(path).suffix, _ANY_TYPE),
            sha256=sha256_file(folder / path),
            size=status.st_size,
        )
        for index, folder in sorted(parts.items())
        for path, status in walk(folder)
    }


def write_build(path: Path, record: BuildRecord, parts: Mapping[int, Path]) -> None:
    """Write a build's folder.

    Args:
        path: a folder that does not exist.
        record: record of the build.
        parts: as for `file_entries`.

    Raises:
        StorageError: `path` is taken, or the disk is full.
        IntegrityError: a file has changed since the record was made.
    """
    with new_folder(path) as folder:
        for file, entry in record.files.items():
            index, _, inner = file.partition("/")
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            copy_checked(parts[int(index)], inner, entry, folder / file)
        write_bytes(folder / BUILD_FILE, record.to_bytes())


def copy_parts(path: Path, record: BuildRecord, target: Path) -> dict[int, Path]:
    """Copy the files of a build, without its record and signatures.

    Args:
        path: folder of the build.
        record: its record.
        target: an empty folder.

    Returns:
        Index on the pipeline axis -> folder with its graphs.

    Raises:
        IntegrityError: a file has changed since the record was made.
    """
    for file, entry in record.files.items():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        copy_checked(path, file, entry, target / file)
    return {int(folder.name): folder for folder in sorted(target.iterdir())}


def is_build(path: Path) -> bool:
    """Return True if a folder contains a build."""
    return (path / BUILD_FILE).is_file()


def read_build(path: Path) -> tuple[BuildRecord, str]:
    """Return the record of a build's folder, and the sha256 of its bytes.

    Raises:
        StorageError: there is no build.
        IntegrityError: the record is damaged.
        UnsafePackageError: it contains what the format does not allow.
    """
    if not is_build(path):
        raise StorageError(
            "there is no build here", where=str(path), expected=f"a folder with {BUILD_FILE}"
        )
    with open_inside(path, BUILD_FILE) as file:
        data = file.read(MAX_RECORD + 1)
    return BuildRecord.from_bytes(data, f"{path}/{BUILD_FILE}"), sha256_bytes(data)


def check_build(path: Path) -> tuple[BuildRecord, str]:
    """Read every byte of a build, and return the record and its sha256.

    Raises:
        IntegrityError: a file is missing, damaged or not listed; otherwise as `read_build`.
    """
    record, digest = read_build(path)
    for file, entry in record.files.items():
        _check_file(path, file, entry)
    listed = {BUILD_FILE, *record.files}
    for file, _ in walk(path):
        if file not in listed and not file.startswith(f"{SIGNATURES}/"):
            raise IntegrityError("a file is not listed in build.json", where=str(path / file))
    return record, digest


def listed_digests(record: BuildRecord, digest: str) -> dict[str, str]:
    """Return exactly the files that a signature of a build covers: path -> sha256.

    Args:
        record: the record.
        digest: sha256 of its bytes.
    """
    return {BUILD_FILE: digest, **{path: entry.sha256 for path, entry in record.files.items()}}


def _check_file(root: Path, file: str, entry: FileEntry) -> None:
    hashed, size = hashlib.sha256(), 0
    with open_inside(root, file) as opened:
        while block := opened.read(2**20):
            hashed.update(block)
            size += len(block)
    digest = hashed.hexdigest()
    if (size, digest) != (entry.size, entry.sha256):
        raise IntegrityError(
            "a file of the build is damaged",
            where=file,
            expected=f"{entry.size} bytes of sha256 {entry.sha256}",
            got=f"{size} bytes of sha256 {digest}",
            hint="Make the build again, or fetch it again.",
        )
