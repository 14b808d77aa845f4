"""Records of releases in a store; most are append-only. docs/guides/store.md has every field."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from trainload.core.errors import StorageError, UnsafePackageError
from trainload.core.records import Nonce, Sealed, Text, Time, check_finite
from trainload.packaging.format.field_types import SafePath, Sha256
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import MANIFEST

TRAVELLING = ("debug", "signatures")
"""Folders outside a package's identity that are published with it. derived/ is a cache of one
machine and is not.
"""
_ID = re.compile(r"[0-9]{8}(-[0-9a-f]{16})?")
_LINE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def _line(name: str) -> str:
    if not _LINE.fullmatch(name) or name.endswith("."):
        raise ValueError(
            f"{name!r} is not a valid line name (lowercase letters, digits and _ . -, at most 64)"
        )
    return name


Line = Annotated[str, AfterValidator(_line)]
ReleaseId = Annotated[str, Field(pattern=rf"^{_ID.pattern}$")]
FactName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
Fact = Annotated[bool | int | float | Text, AfterValidator(check_finite)]
Verdict = Literal["candidate", "rejected"]


class StoreInfo(Sealed):
    """store.json, which marks a folder as a store."""


class Release(Sealed):
    """A package that was published in a line. Immutable.

    Attributes:
        id: position in the line, and name of the record's file.
        package: digest of the package, that is of its manifest.json; `program` and `weights` are
            digests of its parts.
        parent: release of this line from which the package was made, if any.
        files: every stored file of the package: manifest.json, the files that it lists, and those
            of debug/ and signatures/.
        verdict: the publisher's verdict; `reason` says why a release was rejected.
        message: the publisher's message.
        facts: facts recorded by the publisher: metrics, the snapshot of the data, the run.
        created: time of publication in UTC.
        nonce: 16 random bytes in hex, so that no two records are equal.
    """

    line: Line
    id: ReleaseId
    package: Sha256
    program: Sha256
    weights: Sha256
    parent: ReleaseId | None
    files: Annotated[dict[SafePath, FileEntry], Field(max_length=100_000)]
    verdict: Verdict
    reason: Text
    message: Text
    facts: Annotated[dict[FactName, Fact], Field(max_length=256)]
    created: Time
    nonce: Nonce

    @property
    def name(self) -> str:
        """Readable id: "7"."""
        return shown(self.id)

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes; files with equal bytes count once."""
        return sum({entry.sha256: entry.size for entry in self.files.values()}.values())


class Pointer(Sealed):
    """One entry of a line's history of current releases: from this entry on, `release` with
    `package` is current, for `reason`.
    """

    line: Line
    id: ReleaseId
    release: ReleaseId
    package: Sha256
    reason: Text
    created: Time
    nonce: Nonce


class Mark(Sealed):
    """A later verdict on a published release: it was rejected, reinstated as a candidate, or its
    files were removed.
    """

    line: Line
    release: ReleaseId
    verdict: Literal["candidate", "rejected", "removed"]
    reason: Text
    created: Time
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """A release and its present status.

    `status` is "removed" (its files were removed), "current", "rejected", "promoted" (it was
    current once), or "candidate"; `reason` says why it was rejected, removed or made current.
    """

    ORDER: ClassVar[tuple[str, ...]] = ("removed", "current", "rejected", "promoted", "candidate")

    release: Release
    status: str
    reason: str


def shown(release: str) -> str:
    """Return an id in readable form: "00000007" -> "7"."""
    number, _, suffix = release.partition("-")
    return f"{int(number)}-{suffix}" if suffix else str(int(number))


def release_id(text: str | int) -> str:
    """Return the id of a readable release name: the inverse of `shown`.

    Raises:
        StorageError: it is not a release's name.
    """
    number, dash, suffix = str(text).partition("-")
    identifier = f"{int(number):08d}{dash}{suffix}" if re.fullmatch(r"[0-9]{1,8}", number) else ""
    if not _ID.fullmatch(identifier):
        raise StorageError(
            "this is not a release",
            where=str(text),
            expected="a number, as `trainload releases` shows it",
        )
    return identifier


def is_id(name: str) -> bool:
    """Return True if a file's name without .json is an id."""
    return _ID.fullmatch(name) is not None


def is_line(name: str) -> bool:
    """Return True if a line may have this name."""
    return _LINE.fullmatch(name) is not None and not name.endswith(".")


def check_files(files: dict[str, FileEntry], where: str) -> None:
    """Check that a release may contain these files.

    Raises:
        UnsafePackageError: the manifest is missing, a path is not allowed, or two paths differ in
            case only.
    """
    if MANIFEST not in files:
        raise UnsafePackageError("a release has no manifest", where=where)
    check_paths(files, where)
    for path in files:
        parts = path.split("/")
        if parts[0] == "derived" or (parts[0] in TRAVELLING and len(parts) == 1):
            raise UnsafePackageError("this file cannot be part of a release", where=where, got=path)


def check_paths(files: Collection[str], where: str) -> None:
    """Check that a folder can have these files on every file system.

    Raises:
        UnsafePackageError: two paths differ in case only, or one is a folder of another.
    """
    folded: dict[str, str] = {}
    for path in files:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            prefix = "/".join(parts[:end])
            if folded.setdefault(prefix.casefold(), prefix) != prefix:
                raise UnsafePackageError("two paths differ only in case", where=where, got=prefix)
            if end < len(parts) and prefix in files:
                raise UnsafePackageError(
                    "a path is both a file and a folder", where=where, got=prefix
                )
