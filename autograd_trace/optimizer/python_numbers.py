"""Lets an optimizer's arithmetic on Python numbers be captured: what it reads out of tensors stays a 0-dim tensor.

Optimizers read numbers out of their state (`step.item()`), reckon with them in Python and hand them back (`alpha=-lr / correction`).
A graph would freeze those numbers. Within `numbers_stay_tensors` they are 0-dim float64 tensors, which like Python's numbers have its
precision and do not change the dtype of a tensor with dims. And like those they never change: `rate *= 0.5` gives the name another number,
where it would change a tensor for all who hold it.
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


_TAKEN: Mapping[Any, str] = {Tensor.__int__: "int", Tensor.__float__: "float", Tensor.__index__: "index"}
"""What makes a Python number of a tensor. Of a real one, such as an option of the group, it may."""
_IN_PLACE: Mapping[Any, Callable[[Any, Any], Any]] = {
    Tensor.add_: operator.add,
    Tensor.sub_: operator.sub,
    Tensor.mul_: operator.mul,
    Tensor.div_: operator.truediv,
    Tensor.floor_divide_: operator.floordiv,
    Tensor.remainder_: operator.mod,
    Tensor.pow_: operator.pow,
}
"""What `+=` and its like call."""
_MARK = "trainload_number"
"""An attribute of tensors that stand for a number of Python's."""
_COMPARISONS = (torch.allclose, Tensor.allclose)
"""What makes a bool of two tensors."""
_DATA: Any = Tensor.data
"""`p.data`, which torch.export does not follow: it is the tensor itself, without gradient."""


@contextmanager
def numbers_stay_tensors(decide: Callable[[Tensor], bool]) -> Iterator[None]:
    """Within it `.item()` of a number, `min`, `max`, functions of `math` and the number arguments of tensor operators take and give 0-dim
    tensors. `int` and `float` of a tensor stay what they are: a graph cannot depend on them.

    Args:
        decide: answers what a tensor is as a bool, where Python branches on it.
    """
    patches: list[Any] = [
        mock.patch.object(builtins, "min", _extreme(builtins.min, torch.minimum)),
        mock.patch.object(builtins, "max", _extreme(builtins.max, torch.maximum)),
        mock.patch.object(math, "pow", _power),
        *(mock.patch.object(math, name, _of_tensors(getattr(math, name), function)) for name, function in _MATH.items()),
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
    """A Python number as the tensor that stands for it."""
    return standing_for_number(torch.full((), float(value), dtype=torch.float64))


def standing_for_number(tensor: Tensor) -> Tensor:
    """The same tensor, known as one that stands for a number of Python's and never changes."""
    setattr(tensor, _MARK, True)
    return tensor


def _is_number(value: Any) -> bool:
    return hasattr(value, _MARK)


def _read(tensor: Tensor) -> Tensor:
    """The number that a tensor of one element holds."""
    return standing_for_number(tensor.reshape(()).to(torch.float64))


class _NumbersStayTensors(TorchFunctionMode):
    def __init__(self, decide: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._decide = decide

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        apart = _IN_PLACE.get(func) if args and _is_number(args[0]) else None
        result = self._call(func, args, dict(kwargs or {})) if apart is None else apart(*args)
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        if isinstance(result, Tensor) and result.ndim == 0 and tensors and all(_is_number(t) for t in tensors):
            standing_for_number(result)
        return result

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if func is Tensor.__bool__ or (func is Tensor.item and args[0].dtype is torch.bool):
            return self._decide(args[0])
        if func is Tensor.item:
            return _read(args[0])
        if func in _TAKEN:
            try:
                return func(*args)
            except Exception as error:
                raise ValueError(f"{_TAKEN[func]}() takes a number out of a tensor, and the graph would keep that number") from error
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            return args[0].copy_(args[1])
        factor = given.get("alpha", given.get("value"))
        if isinstance(factor, Tensor) and len(args) > 1:
            # `x.add(y, alpha=a)` scales y, `x.addcdiv(y, z, value=a)` too, in the dtype that torch would reckon in.
            given = {name: value for name, value in given.items() if name not in ("alpha", "value")}
            args = (args[0], _widened(args[1], args[0]) * factor, *args[2:])
        if func is torch.full_like:
            filled, rest = _filled(*args, **given)
            return torch.ones_like(args[0], **rest) * filled if isinstance(filled, Tensor) else func(*args, **given)
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        if func in _COMPARISONS:
            return self._decide(torch.isclose(*args, **given).all())
        return func(*args, **given)


def _filled(like: Tensor, fill_value: Any, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """What `torch.full_like` is to fill with, and its other options."""
    return fill_value, rest


def _widened(value: Any, beside: Tensor) -> Any:
    """`value` in the dtype of its sum with another tensor."""
    if not isinstance(value, Tensor) or value.ndim == 0 or beside.ndim == 0 or value.dtype == beside.dtype:
        return value
    return value.to(torch.promote_types(value.dtype, beside.dtype))


def _extreme(python: Callable[..., Any], function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or kwargs or not any(isinstance(a, Tensor) for a in args):
            return python(*args, **kwargs)
        return functools.reduce(function, (a if isinstance(a, Tensor) else as_number(a) for a in args))

    return extreme


def _of_tensors(python: Callable[[Any], Any], function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda value: function(_read(value)) if isinstance(value, Tensor) else python(value)


_python_power = math.pow


def _power(base: Any, exponent: Any) -> Any:
    numbers = tuple(_read(value) if isinstance(value, Tensor) else value for value in (base, exponent))
    return numbers[0] ** numbers[1] if any(isinstance(value, Tensor) for value in numbers) else _python_power(base, exponent)
