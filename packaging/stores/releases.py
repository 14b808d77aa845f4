"""What a store says of releases: records that are written once, one after another. docs/store.md specifies every field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from trainload.core.errors import StorageError, UnsafePackageError
from trainload.core.records import Nonce, Sealed, Text, Time, check_finite
from trainload.packaging.format.manifest import MANIFEST, FileEntry, SafePath, Sha256

TRAVELLING = ("debug", "signatures")
"""Folders outside a package's identity that travel with it. derived/ is a cache of the machine that made it."""
_ID = re.compile(r"[0-9]{8}(-[0-9a-f]{16})?")
_LINE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def _line(name: str) -> str:
    if not _LINE.fullmatch(name) or name.endswith("."):
        raise ValueError(f"{name!r} is no name of a line (small letters, digits and _ . -, at most 64)")
    return name


Line = Annotated[str, AfterValidator(_line)]
ReleaseId = Annotated[str, Field(pattern=rf"^{_ID.pattern}$")]
FactName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
Fact = Annotated[bool | int | float | Text, AfterValidator(check_finite)]
Verdict = Literal["candidate", "rejected"]


class StoreInfo(Sealed):
    """store.json: it says that a folder is a store."""


class Release(Sealed):
    """A package that was published in a line. Never changed.

    Attributes:
        id: its place in the line: the name of its file.
        package: the package's digest, which is that of its manifest.json; `program` and `weights`: of its parts.
        parent: the release of this line that it was made from, where there is one.
        files: every file of the package that the store holds: manifest.json, what that lists, and of debug/ and signatures/.
        verdict: what its publisher thought of it; `reason`: of a rejected one, why.
        message: what its publisher said of it.
        facts: whatever its publisher wants to find again: metrics, the data's snapshot, the run.
        created: when, in UTC.
        nonce: 16 random bytes; no two records are the same.
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
        """The id, for people: "7"."""
        return shown(self.id)

    @property
    def bytes(self) -> int:
        """Of all its files; those of equal bytes count once."""
        return sum({entry.sha256: entry.size for entry in self.files.values()}.values())


class Pointer(Sealed):
    """One entry of a line's history of `current`: from here on it is `release`, and the package `package`. `reason`: why."""

    line: Line
    id: ReleaseId
    release: ReleaseId
    package: Sha256
    reason: Text
    created: Time
    nonce: Nonce


class Mark(Sealed):
    """What became of a release after it was published: it was rejected after all, or its files were removed."""

    line: Line
    release: ReleaseId
    verdict: Literal["candidate", "rejected", "removed"]
    reason: Text
    created: Time
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """A release and what is known of it now.

    `status`: "removed" (its files are no longer there), "current", "rejected", "promoted" (it was current once), or "candidate".
    `reason`: why it was rejected, removed or made current.
    """

    ORDER: ClassVar[tuple[str, ...]] = ("removed", "current", "rejected", "promoted", "candidate")

    release: Release
    status: str
    reason: str


def shown(release: str) -> str:
    """An id for people: "00000007" -> "7"."""
    number, _, rest = release.partition("-")
    return f"{int(number)}-{rest}" if rest else str(int(number))


def release_id(text: str | int) -> str:
    """The inverse of `shown`.

    Raises:
        StorageError: it is no such name.
    """
    number, dash, rest = str(text).partition("-")
    found = f"{int(number):08d}{dash}{rest}" if re.fullmatch(r"[0-9]{1,8}", number) else ""
    if not _ID.fullmatch(found):
        raise StorageError("this is no release", where=str(text), expected="a number, as `trainload releases` shows it")
    return found


def is_id(name: str) -> bool:
    """Whether a file's name without .json is an id."""
    return _ID.fullmatch(name) is not None


def is_line(name: str) -> bool:
    """Whether a line may have this name."""
    return _LINE.fullmatch(name) is not None and not name.endswith(".")


def check_files(files: dict[str, FileEntry], where: str) -> None:
    """Check that a release's files are those of a package, or may accompany one.

    Raises:
        UnsafePackageError: a manifest is missing, a path may not travel, or two paths differ in case only.
    """
    if MANIFEST not in files:
        raise UnsafePackageError("a release has no manifest", where=where)
    folded: dict[str, str] = {}
    for path in files:
        parts = path.split("/")
        if parts[0] == "derived" or (parts[0] in TRAVELLING and len(parts) == 1):
            raise UnsafePackageError("this file cannot be part of a release", where=where, got=path)
        for end in range(1, len(parts) + 1):
            prefix = "/".join(parts[:end])
            if folded.setdefault(prefix.casefold(), prefix) != prefix:
                raise UnsafePackageError("two paths differ only in case", where=where, got=prefix)
            if end < len(parts) and prefix in files:
                raise UnsafePackageError("a path is a file and a folder", where=where, got=prefix)
