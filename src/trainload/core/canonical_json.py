"""Canonical JSON, a parser for untrusted input, and file digests.

Canonical form: keys of objects sorted by code point, no spaces, no NaN or infinities, integers in
full, floats as the shortest decimal that reads back as the same double (Python's `repr`), strings
in UTF-8 with only the escapes that JSON requires, no newline at the end.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.core.work_steps import ByteStep

MAX_BYTES = 256 * 2**20
"""Maximum size of one JSON file in bytes."""
MAX_DEPTH = 128
"""Maximum nesting depth of objects and arrays."""

_READ_BYTES = 2**20
_BLOCK = 2**24
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def canonical_json(value: object) -> bytes:
    """Encode `value` (dicts with str keys, lists, tuples, str, int, float, bool, None).

    Law: canonical_json(parse_canonical(b, "")) == b for every b that this function returns.

    Raises:
        PackageError: the value contains a NaN, an infinity, a lone surrogate or something that is
            not JSON.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
        ).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise PackageError(
            f"it cannot be written as JSON: {error}",
            expected="finite numbers, strings, lists and objects",
        ) from error


def parse_canonical(
    data: bytes, where: str, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH
) -> Any:
    """Decode canonical JSON that may be hostile. `where` is the file's name, for errors.

    Raises:
        UnsafePackageError: it is too large or nested too deeply, or has a duplicate key or a NaN.
        IntegrityError: it is not UTF-8, not JSON, or not in canonical form.
    """
    if len(data) > max_bytes:
        raise UnsafePackageError(
            "JSON file is too large",
            where=where,
            expected=f"at most {max_bytes} bytes",
            got=str(len(data)),
        )
    depth = nesting(data)
    if depth > max_depth:
        raise UnsafePackageError(
            "JSON is nested too deeply",
            where=where,
            expected=f"at most {max_depth} levels",
            got=str(depth),
        )

    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_not_finite)
    except _NotFiniteError as error:
        raise UnsafePackageError(
            "JSON contains a number that is not finite", where=where, got=str(error)
        ) from error
    except ValueError as error:
        raise IntegrityError(
            f"not readable as JSON in UTF-8: {error}", where=where, hint="Fetch the package again."
        ) from error
    try:
        reencoded = canonical_json(value)
    except PackageError as error:  # 1e999 parses as an infinity, "\\ud800" as a lone surrogate
        raise UnsafePackageError(error.problem, where=where) from error
    if reencoded != data:
        json.loads(text, object_pairs_hook=lambda items: _check_no_duplicates(items, where))
        raise IntegrityError(
            "JSON is not in canonical form", where=where, hint="Fetch the package again."
        )
    return value


def parse_json(data: bytes | str) -> Any:
    """Decode any JSON that someone else wrote.

    Raises:
        ValueError: it is not JSON, or is nested more deeply than Python's parser goes.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def nesting(data: bytes) -> int:
    """Return the nesting depth of objects and arrays in JSON, in a fraction of the time of parsing.

    For text that is not JSON, the result is right up to the character at which a parser stops.
    """
    structure = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
    # 1 inside a string; depth after the last bracket; maximum so far
    within, depth, deepest = 0, 0, 0
    for start in range(0, len(structure), _BLOCK):
        marks = np.frombuffer(
            structure, dtype=np.uint8, count=min(_BLOCK, len(structure) - start), offset=start
        )
        strings = np.bitwise_xor.accumulate((marks == ord('"')).view(np.uint8)) ^ within
        depths = np.cumsum(_STEPS[marks] * (strings == 0), dtype=np.int32) + depth
        within, depth, deepest = int(strings[-1]), int(depths[-1]), max(deepest, int(depths.max()))
    return deepest


class _NotFiniteError(Exception):
    pass


def _not_finite(text: str) -> NoReturn:
    raise _NotFiniteError(text)


def _check_no_duplicates(items: list[tuple[str, Any]], where: str) -> None:
    """Raise with the name of a duplicate key. The comparison of bytes detects that there is one."""
    seen: set[str] = set()
    for name, _ in items:
        if name in seen:
            raise UnsafePackageError("JSON object has a duplicate key", where=where, got=repr(name))
        seen.add(name)


def sha256_bytes(data: bytes | memoryview) -> str:
    """Return the sha256 of `data`, in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, step: ByteStep | None = None) -> str:
    """Return the sha256 of a file, in lower-case hex.

    Args:
        path: the file, which is read one MiB at a time.
        step: counts the bytes that were read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            if step is not None:
                step.add(len(block))
    return digest.hexdigest()
