"""Checks what a caller gives against the annotations of what takes it. pydantic reads them; what it says becomes an error of ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, get_type_hints

import numpy
from pydantic import BaseModel, ConfigDict, InstanceOf, TypeAdapter, ValidationError

from trainload.capture.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=RequestError)

_STRICT = ConfigDict(arbitrary_types_allowed=True, strict=True)
"""Nothing is converted: True is no number, and "4" is none."""
_OF_TYPES = ("_type", "_instance_of")
"""How pydantic's names of complaints about a type end."""
_UNKNOWN = object()
_SHOWN = 100
"""So many characters of a value are shown."""


def out_of_range(
    error: ValidationError, kind: type[E], where: str = "", names: Mapping[str, str] = MappingProxyType({}), value: object = _UNKNOWN
) -> E:
    """Return pydantic's first complaint as an error of `kind`.

    Args:
        error: of a model or of an adapter.
        kind: the class of the result.
        where: what the fields belong to.
        names: field -> its name as a caller knows it, where that is another one.
        value: what was looked at, if it was no model.
    """
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    parts = [str(part) for part in first["loc"]] if value is _UNKNOWN else _inside(value, first["loc"])
    alternatives = found if value is not _UNKNOWN else found[:1]
    expected = [each["msg"].removeprefix("Input should be ") for each in alternatives if each["input"] is first["input"]]
    problem = "is of the wrong type" if first["type"].endswith(_OF_TYPES) else "is out of its range"
    place = ".".join(filter(None, [where, *(names.get(part, part) for part in parts)]))
    return kind(problem, where=place, expected=" or ".join(dict.fromkeys(expected)), got=shown(first["input"]))


def shown(value: object) -> str:
    """Return a value as messages show it: on one line, and not all of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def demand_arguments(kind: type[RequestError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that arguments that its annotations do not allow raise `kind`, which names them."""

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            _demand(signature.bind(*args, **kwargs).arguments, _adapters(function), "", kind)
            return function(*args, **kwargs)

        return inside

    return checked


def demand_fields(record: Any, where: str, kind: type[RequestError]) -> None:
    """Demand that a dataclass holds what its annotations say.

    Raises:
        RequestError: of `kind`; it names the field, as one of `where`.
    """
    _demand({field.name: getattr(record, field.name) for field in fields(record)}, _adapters(type(record)), where, kind)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _adapters(annotated: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(annotated, include_extras=True)
    return {name: _adapter(hint) for name, hint in hints.items() if name != "return"}


def _adapter(hint: Any) -> TypeAdapter[Any]:
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):  # pydantic has these bring settings of their own
        return TypeAdapter(InstanceOf[hint])
    return TypeAdapter(hint, config=_STRICT)


def _demand(values: Mapping[str, Any], adapters: Mapping[str, TypeAdapter[Any]], where: str, kind: type[RequestError]) -> None:
    for name, value in values.items():
        try:
            adapters[name].validate_python(value.item() if isinstance(value, numpy.generic) else value)
        except ValidationError as error:
            raise out_of_range(error, kind, ".".join(filter(None, [where, name])), value=value) from error


def _inside(value: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys and indices of a place within `value`; between them pydantic names the alternatives of a union."""
    found = []
    for part in place:
        if isinstance(value, Mapping | Sequence) and not isinstance(value, str) and _holds(value, part):
            found.append(str(part))
            value = value[part]  # type: ignore[index]  # it holds it
    return found


def _holds(value: Mapping[Any, Any] | Sequence[Any], part: int | str) -> bool:
    return part in value if isinstance(value, Mapping) else isinstance(part, int) and part < len(value)
