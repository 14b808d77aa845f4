"""The one canonical JSON of this project, a parser that distrusts its input, and file digests.

Canonical: objects with keys sorted by code point, no spaces, no NaN or infinities, integers in full, floats as the shortest
decimal that reads back as the same double (Python's `repr`), strings in UTF-8 with only the escapes that JSON demands, no newline
at the end.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError

MAX_BYTES = 256 * 2**20
"""Bytes of one JSON file."""
MAX_DEPTH = 128
"""Objects and arrays inside one another."""

_READ = 2**20
_BLOCK = 2**24
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def canonical_json(value: object) -> bytes:
    """Encode `value` (dicts with str keys, lists, tuples, str, int, float, bool, None).

    Law: canonical_json(parse_canonical(b, "")) == b for every b that this function returns.

    Raises:
        PackageError: it holds a NaN, an infinity, a lone surrogate or something that is not JSON.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise PackageError(f"it cannot be written as JSON: {error}", expected="finite numbers, strings, lists and objects") from error


def parse_canonical(data: bytes, where: str, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Decode canonical JSON that may be hostile. `where` is the file's name, for errors.

    Raises:
        UnsafePackageError: it is too large or too deep, has a duplicate key or a NaN.
        IntegrityError: it is not UTF-8, not JSON, or not in canonical form.
    """
    if len(data) > max_bytes:
        raise UnsafePackageError("JSON file is too large", where=where, expected=f"at most {max_bytes} bytes", got=str(len(data)))
    depth = nesting(data)
    if depth > max_depth:
        raise UnsafePackageError("JSON is nested too deeply", where=where, expected=f"at most {max_depth} levels", got=str(depth))

    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_not_finite)
    except _NotFiniteError as error:
        raise UnsafePackageError("JSON holds a number that is not finite", where=where, got=str(error)) from error
    except ValueError as error:
        raise IntegrityError(f"not readable as JSON in UTF-8: {error}", where=where, hint="Fetch the package again.") from error
    try:
        again = canonical_json(value)
    except PackageError as error:  # 1e999 reads as an infinity, "\\ud800" as a lone surrogate
        raise UnsafePackageError(error.problem, where=where) from error
    if again != data:
        json.loads(text, object_pairs_hook=lambda items: _check_no_duplicates(items, where))
        raise IntegrityError("JSON is not in canonical form", where=where, hint="Fetch the package again.")
    return value


def nesting(data: bytes) -> int:
    """How deep the objects and arrays of JSON are nested, in a fraction of the time that parsing takes.

    Where the text is no JSON, it is right up to the character at which a parser stops.
    """
    structure = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
    within, depth, deepest = 0, 0, 0  # in a string; of the last bracket; so far
    for start in range(0, len(structure), _BLOCK):
        marks = np.frombuffer(structure, dtype=np.uint8, count=min(_BLOCK, len(structure) - start), offset=start)
        strings = np.bitwise_xor.accumulate((marks == ord('"')).view(np.uint8)) ^ within
        depths = np.cumsum(_STEPS[marks] * (strings == 0), dtype=np.int32) + depth
        within, depth, deepest = int(strings[-1]), int(depths[-1]), max(deepest, int(depths.max()))
    return deepest


class _NotFiniteError(Exception):
    pass


def _not_finite(text: str) -> NoReturn:
    raise _NotFiniteError(text)


def _check_no_duplicates(items: list[tuple[str, Any]], where: str) -> None:
    """Duplicate keys are noticed by the comparison of bytes; this finds their name."""
    seen: set[str] = set()
    for name, _ in items:
        if name in seen:
            raise UnsafePackageError("JSON object has a key twice", where=where, got=repr(name))
        seen.add(name)


def sha256_bytes(data: bytes | memoryview) -> str:
    """The sha256 of `data`, in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """The sha256 of a file, in lower-case hex, read one MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ):
            digest.update(block)
    return digest.hexdigest()
