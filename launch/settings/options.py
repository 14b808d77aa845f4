"""Keyword arguments of a function, declared by a pydantic model: names, types, defaults and
descriptions are written once, there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, overload

from pydantic import BaseModel, ValidationError

from trainload.core.arguments import out_of_range, shown
from trainload.core.errors import RequestError
from trainload.core.suggestions import did_you_mean
from trainload.launching.settings.info import description_of

P = ParamSpec("P")
M = TypeVar("M", bound=BaseModel)
M_co = TypeVar("M_co", bound=BaseModel, covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")


class _Decorator(Protocol[M_co, P]):
    @overload
    def __call__(self, function: Callable[[A, M_co], R]) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(
        self, function: Callable[[A, B, C, M_co], R]
    ) -> Callable[Concatenate[A, B, C, P], R]: ...


def takes_options(model: Callable[P, M]) -> _Decorator[M, P]:
    """Decorate a function whose last argument is an instance of `model`, so that callers give the
    model's fields as keyword arguments.

    Args:
        model: a class of pydantic models.

    Returns:
        A decorator. The decorated function raises RequestError, which names the argument, if one is
        unknown, missing or invalid.
    """
    assert isinstance(model, type) and issubclass(model, BaseModel)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> R:
            return function(*args, model_of(model, options))

        leading = list(inspect.signature(function).parameters.values())[:-1]
        inside.__signature__ = inspect.Signature([*leading, *_keyword_parameters(model)])  # type: ignore[attr-defined]  # for help() and editors
        return inside

    return decorate


def _keyword_parameters(model: type[BaseModel]) -> list[inspect.Parameter]:
    """Return the fields of a model as parameters, those that it declares itself before those of its
    bases.
    """
    declared = (name for base in model.__mro__ for name in inspect.get_annotations(base))
    names = dict.fromkeys(name for name in declared if name in model.model_fields)
    parameters = inspect.signature(model).parameters
    return [
        parameters[name].replace(annotation=model.model_fields[name].annotation) for name in names
    ]


def model_of(model: type[R], options: dict[str, Any]) -> R:
    """Make an instance of a model from a user's options.

    Raises: RequestError: one is unknown, missing or invalid.
    """
    assert issubclass(model, BaseModel)
    try:
        return model(**options)
    except ValidationError as error:
        raise _request_error(error, model) from error


def _request_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    field = model.model_fields.get(name)
    if field is None:
        return RequestError(
            "there is no such option",
            where=name,
            expected=f"one of {', '.join(sorted(model.model_fields))}",
            hint=did_you_mean(
                name,
                model.model_fields,
                "Pass changes of the training settings in `overrides`.",
            ),
        )
    if first["type"] == "missing":
        return RequestError("is missing", where=name, expected=description_of(field) or "a value")
    if Path in get_args(field.annotation):
        return RequestError(
            "has the wrong type", where=name, expected="a path", got=shown(first["input"])
        )
    return out_of_range(error, RequestError)
