"""Records of releases in a store; most are append-only. docs/store.md specifies every field."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import IntegrityError, StorageError, UnsafePackageError
from trainload.packaging.format.guard_entries import Record
from trainload.packaging.format.manifest import MANIFEST, FileEntry, SafePath, Sha256

STORE_VERSION = 1
"""History: 1 (2026-11-22) first version."""
MAX_RECORD = 4 * 2**20
"""Maximum size of one record in bytes."""
TRAVELLING = ("debug", "signatures")
"""Folders outside a package's identity that are published with it. derived/ is a cache of one
machine and is not.
"""
_DEPTH = 8
_ID = re.compile(r"[0-9]{8}(-[0-9a-f]{16})?")
_LINE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def _line(name: str) -> str:
    if not _LINE.fullmatch(name) or name.endswith("."):
        raise ValueError(f"{name!r} is no name of a line (small letters, digits and _ . -, at most 64)")
    return name


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number does not fit into 64 bits")
    return value


Line = Annotated[str, AfterValidator(_line)]
ReleaseId = Annotated[str, Field(pattern=rf"^{_ID.pattern}$")]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=8192)]
Time = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
FactName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
Fact = Annotated[bool | int | float | Text, AfterValidator(_finite)]
Verdict = Literal["candidate", "rejected"]


class Sealed(Record):
    """A record of a store. Law: `from_bytes(r.to_bytes(), w) == r`.

    The file is canonical JSON of the fields and of `checksum`, the sha256 of the same JSON without
    `checksum`.
    """

    format_version: Literal[1] = 1

    def to_bytes(self) -> bytes:
        """Return the file's bytes."""
        fields = self.model_dump(mode="json")
        return canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse the file, which may be hostile.

        Raises:
            IntegrityError: it is damaged.
            UnsafePackageError: it is too large, nested too deeply, or contains what the format does
                not allow.
            StorageError: it has a newer format.
        """
        raw = parse_canonical(data, where, max_bytes=MAX_RECORD, max_depth=_DEPTH)
        if not isinstance(raw, dict):
            raise IntegrityError("a record of the store is no object", where=where)
        version = raw.get("format_version")
        if isinstance(version, int) and not isinstance(version, bool) and version > STORE_VERSION:
            raise StorageError(
                "the store was written in a newer format", where=where, expected=f"format {STORE_VERSION}", got=f"format {version}",
                cure="Update trainload.",
            )  # fmt: skip
        if raw.pop("checksum", None) != sha256_bytes(canonical_json(raw)):
            raise IntegrityError("a record of the store is damaged: its checksum is another one", where=where)
        try:
            return cls.model_validate_json(canonical_json(raw))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UnsafePackageError(f"the record's field {place} is wrong: {first['msg']}", where=where) from error


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
    number, _, rest = release.partition("-")
    return f"{int(number)}-{rest}" if rest else str(int(number))


def release_id(text: str | int) -> str:
    """Return the id of a readable release name: the inverse of `shown`.

    Raises:
        StorageError: it is not a release's name.
    """
    number, dash, rest = str(text).partition("-")
    found = f"{int(number):08d}{dash}{rest}" if re.fullmatch(r"[0-9]{1,8}", number) else ""
    if not _ID.fullmatch(found):
        raise StorageError("this is no release", where=str(text), expected="a number, as `trainload releases` shows it")
    return found


def is_id(name: str) -> bool:
    """Return True if a file's name without .json is an id."""
    return _ID.fullmatch(name) is not None


def is_line(name: str) -> bool:
    """Return True if a line may have this name."""
    return _LINE.fullmatch(name) is not None and not name.endswith(".")


def now() -> str:
    """Return the present time in the form that records use."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def check_files(files: dict[str, FileEntry], where: str) -> None:
    """Check that a release may contain these files.

    Raises:
        UnsafePackageError: the manifest is missing, a path is not allowed, or two paths differ in
            case only.
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
