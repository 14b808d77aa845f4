"""Validation of arguments and dataclass fields by pydantic, with trainload's errors."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, get_type_hints

import numpy
from pydantic import BaseModel, ConfigDict, InstanceOf, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainload.core.errors import RequestError
from trainload.core.suggestions import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=RequestError)

_STRICT = ConfigDict(arbitrary_types_allowed=True, strict=True)
"""No conversion: neither True nor "4" is accepted as a number."""
_TYPE_ERRORS = ("_type", "_instance_of")
"""Suffixes of pydantic's error types that mean a wrong type, rather than a wrong value."""
_UNKNOWN = object()
_SHOWN = 100
"""Maximum number of characters of a value in a message."""


def out_of_range(
    error: ValidationError,
    kind: type[E],
    where: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
    value: object = _UNKNOWN,
) -> E:
    """Convert pydantic's first error to one of trainload's.

    Args:
        error: raised by a pydantic model or a type adapter.
        kind: class of the result.
        where: prefix of the field's name, such as "Job".
        names: field -> name that users know, if it is different.
        value: the validated value, if it was validated by a type adapter.
    """
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    parts = (
        [str(part) for part in first["loc"]]
        if value is _UNKNOWN
        else _value_path(value, first["loc"])
    )
    alternatives = errors if value is not _UNKNOWN else errors[:1]
    expected = [
        each["msg"].removeprefix("Input should be ")
        for each in alternatives
        if each["input"] is first["input"]
    ]
    problem = "has the wrong type" if first["type"].endswith(_TYPE_ERRORS) else "is out of range"
    place = ".".join(filter(None, [where, *(names.get(part, part) for part in parts)]))
    return kind(
        problem,
        where=place,
        expected=" or ".join(dict.fromkeys(expected)),
        got=shown(first["input"]),
        hint=nearest_literal(first),
    )


def nearest_literal(error: ErrorDetails) -> str:
    """Return the hint of one of pydantic's errors about a text that is none of the allowed ones."""
    if error["type"] != "literal_error":
        return ""
    return did_you_mean(str(error["input"]), re.findall(r"'([^']*)'", error["msg"]))


def shown(value: object) -> str:
    """Return the repr of a value on one line, truncated."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check_arguments(kind: type[RequestError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an argument that does not match its annotation raises `kind`,
    with the argument's name.
    """

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            _validate_values(
                signature.bind(*args, **kwargs).arguments, _adapters(function), "", kind
            )
            return function(*args, **kwargs)

        return inside

    return checked


def check_fields(record: Any, where: str, kind: type[RequestError]) -> None:
    """Check the fields of a dataclass against their annotations.

    Args:
        record: an instance of a dataclass.
        where: prefix of the field's name in messages, such as "Job".
        kind: class of the error.

    Raises:
        RequestError: a field has a wrong type or value; it is an instance of `kind`.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    adapters = _adapters(type(record))  # type: ignore[arg-type]  # a class is hashable
    _validate_values(values, adapters, where, kind)


@functools.cache
def _adapters(annotated: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(annotated, include_extras=True)
    return {name: _adapter(hint) for name, hint in hints.items() if name != "return"}


def _adapter(hint: Any) -> TypeAdapter[Any]:
    # pydantic does not accept a config for these
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
        return TypeAdapter(InstanceOf[hint])
    return TypeAdapter(hint, config=_STRICT)


def _validate_values(
    values: Mapping[str, Any],
    adapters: Mapping[str, TypeAdapter[Any]],
    where: str,
    kind: type[RequestError],
) -> None:
    for name, value in values.items():
        try:
            adapters[name].validate_python(
                value.item() if isinstance(value, numpy.generic) else value
            )
        except ValidationError as error:
            raise out_of_range(
                error, kind, ".".join(filter(None, [where, name])), value=value
            ) from error


def _value_path(value: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys and indices in the location of a pydantic error, without the names of union
    members in between.
    """
    keys = []
    for part in place:
        if (
            isinstance(value, Mapping | Sequence)
            and not isinstance(value, str)
            and _has_part(value, part)
        ):
            keys.append(str(part))
            value = value[part]  # type: ignore[index]  # `_has_part` has checked it
    return keys


def _has_part(value: Mapping[Any, Any] | Sequence[Any], part: int | str) -> bool:
    return (
        part in value if isinstance(value, Mapping) else isinstance(part, int) and part < len(value)
    )
