"""Base classes of records that are written once and read by other versions: strict, and sealed by a
checksum.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import IntegrityError, StorageError, UnsafePackageError

STORE_VERSION = 1
"""Format of sealed records. History: 1 (2026-11-22) the first."""
MAX_RECORD = 4 * 2**20
"""Maximum bytes of a sealed record."""
_DEPTH = 8

Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=8192)]
Time = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]


class LeanRecord(BaseModel):
    """A record that omits fields that were added later and have their defaults, so that older
    records keep their bytes.

    Attributes:
        later: names of those fields.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _lean(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {
            k: v
            for k, v in fields.items()
            if k not in self.later
            or getattr(self, k) != type(self).model_fields[k].get_default(call_default_factory=True)
        }


class Record(LeanRecord):
    """An immutable object of a file, validated without conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Sealed(Record):
    """A file with one record. Law: `from_bytes(r.to_bytes(), w) == r`.

    It is canonical JSON of the record's fields and of `checksum`, the sha256 of the same without
    `checksum`.
    """

    format_version: Literal[1] = 1

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        fields = self.model_dump(mode="json")
        return canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read the content of a file, which may be hostile.

        Raises:
            IntegrityError: it is damaged.
            UnsafePackageError: it is too large or too deep, or contains what the format does not
                allow.
            StorageError: it is of a newer format.
        """
        raw = parse_canonical(data, where, max_bytes=MAX_RECORD, max_depth=_DEPTH)
        if not isinstance(raw, dict):
            raise IntegrityError("a record of the store is not a JSON object", where=where)
        version = raw.get("format_version")
        if isinstance(version, int) and not isinstance(version, bool) and version > STORE_VERSION:
            raise StorageError(
                "the store was written in a newer format",
                where=where,
                expected=f"format {STORE_VERSION}",
                got=f"format {version}",
                hint="Update trainload.",
            )
        if raw.pop("checksum", None) != sha256_bytes(canonical_json(raw)):
            raise IntegrityError(
                "a record of the store is damaged: its checksum does not match", where=where
            )
        try:
            return cls.model_validate_json(canonical_json(raw))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UnsafePackageError(
                f"the record's field {place} is wrong: {first['msg']}", where=where
            ) from error


def check_finite(value: object) -> object:
    """Return a number that JSON readers keep.

    Raises: ValueError: it is not finite, or has more than 64 bits.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number does not fit into 64 bits")
    return value


def now() -> str:
    """Return the time in UTC, as records contain it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
