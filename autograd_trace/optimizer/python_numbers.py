"""Capture an optimizer's arithmetic on Python numbers: a number that it reads out of a tensor stays
a 0-dim tensor.

Optimizers read numbers out of their state (`step.item()`), compute with them in Python and pass
them to operators (`alpha=-lr / correction`). A graph would freeze those numbers. Within
`numbers_stay_tensors` they are 0-dim float64 tensors, which like Python numbers have double
precision and do not change the dtype of a tensor with dims. Like Python numbers they are also
immutable: `rate *= 0.5` rebinds the name to another number, where it would otherwise change the
tensor for everyone who holds it.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MATH: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
    "cos": torch.cos,
    "sin": torch.sin,
    "floor": torch.floor,
    "ceil": torch.ceil,
}


_CONVERSIONS: Mapping[Any, str] = {
    Tensor.__int__: "int",
    Tensor.__float__: "float",
    Tensor.__index__: "index",
}
"""Functions that convert a tensor to a Python number. They work on real tensors, such as an option
of the group.
"""
_IN_PLACE: Mapping[Any, Callable[[Any, Any], Any]] = {
    Tensor.add_: operator.add,
    Tensor.sub_: operator.sub,
    Tensor.mul_: operator.mul,
    Tensor.div_: operator.truediv,
    Tensor.floor_divide_: operator.floordiv,
    Tensor.remainder_: operator.mod,
    Tensor.pow_: operator.pow,
}
"""In-place methods that `+=` and similar operators call."""
_MARK = "trainload_number"
"""Attribute of tensors that stand for a Python number."""
_COMPARISONS = (torch.allclose, Tensor.allclose)
"""Functions that return a bool for two tensors."""
_DATA: Any = Tensor.data
"""`p.data`, which torch.export does not trace: here it is the tensor itself, detached."""


@contextmanager
def numbers_stay_tensors(decide: Callable[[Tensor], bool]) -> Iterator[None]:
    """Make functions that handle Python numbers accept and return 0-dim tensors.

    Within the context this holds for `.item()` of a number, `min`, `max`, functions of `math` and
    the number arguments of tensor operators. `int` and `float` of a tensor keep their meaning: a
    graph cannot depend on them.

    Args:
        decide: returns the bool value of a tensor where Python branches on it.
    """
    patches: list[Any] = [
        mock.patch.object(builtins, "min", _extreme(builtins.min, torch.minimum)),
        mock.patch.object(builtins, "max", _extreme(builtins.max, torch.maximum)),
        mock.patch.object(math, "pow", _power),
        *(
            mock.patch.object(math, name, _accepting_tensors(getattr(math, name), function))
            for name, function in _MATH.items()
        ),
    ]
    with _NumbersStayTensors(decide):
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def as_number(value: float) -> Tensor:
    """Return the tensor that stands for a Python number."""
    return standing_for_number(torch.full((), float(value), dtype=torch.float64))


def standing_for_number(tensor: Tensor) -> Tensor:
    """Mark a tensor as one that stands for a Python number and never changes, and return it."""
    setattr(tensor, _MARK, True)
    return tensor


def _is_number(value: Any) -> bool:
    return hasattr(value, _MARK)


def _read(tensor: Tensor) -> Tensor:
    """Return the number that a tensor of one element holds."""
    return standing_for_number(tensor.reshape(()).to(torch.float64))


class _NumbersStayTensors(TorchFunctionMode):
    def __init__(self, decide: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._decide = decide

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        apart = _IN_PLACE.get(func) if args and _is_number(args[0]) else None
        result = self._call(func, args, dict(kwargs or {})) if apart is None else apart(*args)
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        if (
            isinstance(result, Tensor)
            and result.ndim == 0
            and tensors
            and all(_is_number(t) for t in tensors)
        ):
            standing_for_number(result)
        return result

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.__bool__ or (func is Tensor.item and args[0].dtype is torch.bool):
            return self._decide(args[0])
        if func is Tensor.item:
            return _read(args[0])
        if func in _CONVERSIONS:
            try:
                return func(*args)
            except Exception as error:
                raise ValueError(
                    f"{_CONVERSIONS[func]}() reads a number from a tensor, which the graph would"
                    " keep as a constant"
                ) from error
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            return args[0].copy_(args[1])
        factor = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(factor, Tensor) and len(args) > 1:
            # `x.add(y, alpha=a)` scales y, and so does `x.addcdiv(y, z, value=a)`. The product is
            # written out in the dtype of the sum: Muon adds a bfloat16 update to a float32
            # parameter.
            kwargs = {
                name: value for name, value in kwargs.items() if name not in ("alpha", "value")
            }
            args = (args[0], _widen(args[1], args[0]) * factor, *args[2:])
        if func is torch.full_like:
            filled, rest = _split_fill_value(*args, **kwargs)
            return (
                torch.ones_like(args[0], **rest) * filled
                if isinstance(filled, Tensor)
                else func(*args, **kwargs)
            )
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        if func in _COMPARISONS:
            return self._decide(torch.isclose(*args, **kwargs).all())
        return func(*args, **kwargs)


def _split_fill_value(like: Tensor, fill_value: Any, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """Return the fill value of a call of `torch.full_like` and its other options."""
    return fill_value, rest


def _widen(value: Any, other: Tensor) -> Any:
    """Return `value` in the dtype of its sum with another tensor."""
    if (
        not isinstance(value, Tensor)
        or value.ndim == 0
        or other.ndim == 0
        or value.dtype == other.dtype
    ):
        return value
    return value.to(torch.promote_types(value.dtype, other.dtype))


def _extreme(
    python: Callable[..., Any], function: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or kwargs or not any(isinstance(a, Tensor) for a in args):
            return python(*args, **kwargs)
        return functools.reduce(
            function, (a if isinstance(a, Tensor) else as_number(a) for a in args)
        )

    return extreme


def _accepting_tensors(
    python: Callable[[Any], Any], function: Callable[[Tensor], Tensor]
) -> Callable[[Any], Any]:
    return lambda value: function(_read(value)) if isinstance(value, Tensor) else python(value)


_python_power = math.pow


def _power(base: Any, exponent: Any) -> Any:
    numbers = tuple(
        _read(value) if isinstance(value, Tensor) else value for value in (base, exponent)
    )
    return (
        numbers[0] ** numbers[1]
        if any(isinstance(value, Tensor) for value in numbers)
        else _python_power(base, exponent)
    )
