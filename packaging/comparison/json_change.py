"""Differences between two JSON values, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainload.core.canonical_json import canonical_json

_KEYS = ("name", "group", "graph")
"""Fields that name an object in a list of objects."""
_LONG = 200


@dataclass(frozen=True, slots=True)
class Change:
    """A difference, as text. None: absent."""

    name: str
    before: str | None
    after: str | None


class _Absent:
    """The type of ABSENT, which marks a value that one side does not have."""


ABSENT = _Absent()


def changes(name: str, before: Any, after: Any) -> Iterator[Change]:
    """Yield every difference between two JSON values, either of which may be ABSENT.

    Objects are compared by key, lists of named objects by name, lists of strings as sets, and lists
    of numbers at the first difference. Law: there is no change if and only if the canonical JSON of
    both is the same.
    """
    if _is_same(before, after):
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from changes(
                f"{name}.{key}" if name else key, before.get(key, ABSENT), after.get(key, ABSENT)
            )
        return
    if isinstance(before, list) and isinstance(after, list):
        a, b = _by_name(before), _by_name(after)
        if a is not None and b is not None and (list(a) == list(b) or set(a) != set(b)):
            yield from changes(name, a, b)
            return
        if _are_all(before, str) and _are_all(after, str) and set(before) != set(after):
            yield from (
                Change(f"{name}: {entry}", "listed", None) for entry in before if entry not in after
            )
            yield from (
                Change(f"{name}: {entry}", None, "listed") for entry in after if entry not in before
            )
            return
        if (
            _are_all(before, (int, float))
            and _are_all(after, (int, float))
            and max(len(before), len(after)) > 4
        ):
            at = next(
                (
                    i
                    for i, (x, y) in enumerate(zip(before, after, strict=False))
                    if not _is_same(x, y)
                ),
                min(len(before), len(after)),
            )
            yield Change(f"{name}[{at}]", _format_entry(before, at), _format_entry(after, at))
            return
    yield Change(name, spelled(before), spelled(after))


def spelled(value: Any) -> str | None:
    """Return a value as short text; None if it is absent."""
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else canonical_json(value).decode()
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _is_same(before: Any, after: Any) -> bool:
    if before is ABSENT or after is ABSENT:
        return before is after
    return canonical_json(before) == canonical_json(after)


def _are_all(values: Sequence[Any], kind: Any) -> bool:
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def _by_name(values: Sequence[Any]) -> dict[str, Any] | None:
    """Return objects by the field that names them; None if there is no such field, or the names are
    not unique.
    """
    for key in _KEYS:
        by_name = {
            value[key]: value
            for value in values
            if isinstance(value, Mapping) and isinstance(value.get(key), str)
        }
        if len(by_name) == len(values):
            return by_name
    return None


def _format_entry(values: Sequence[Any], at: int) -> str:
    return (
        f"{canonical_json(values[at]).decode()}, of {len(values)}"
        if at < len(values)
        else f"nothing, of {len(values)}"
    )
