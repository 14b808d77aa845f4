"""Random operators as functions of draws: independent numbers, one for each element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainload.capture.initialization.construction_tape import truncated_normal

_aten = torch.ops.aten

Distribution = Literal[
    "uniform", "normal", "truncated normal", "log normal", "exponential", "bernoulli", "geometric",
    "cauchy", "integers",
]  # fmt: skip
"""Distributions of draws. Their parameters, in order:

    uniform           lower bound, upper bound (excluded)
    normal            mean, standard deviation
    truncated normal  mean, standard deviation, lower bound, upper bound
    log normal        mean and standard deviation of the logarithm
    exponential       rate
    bernoulli         probability of 1
    geometric         probability of success
    cauchy            median, scale
    integers          lower bound, upper bound (excluded)
"""
PARAMETERS: Mapping[Distribution, int] = {
    "uniform": 2,
    "normal": 2,
    "truncated normal": 4,
    "log normal": 2,
    "exponential": 1,
    "bernoulli": 1,
    "geometric": 1,
    "cauchy": 2,
    "integers": 2,
}
"""Distribution -> its number of parameters."""


class Unsupported(Exception):
    """A value that cannot be computed again. The message is a clause."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Independent random numbers, one for each element of a tensor."""

    distribution: Distribution
    parameters: tuple[float, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


Use = Callable[[Tensor], Any]
"""Returns a call's result for its draw."""


NORMAL_OF = frozenset(
    {_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor}
)
"""Operators that scale and move standard normal numbers by tensors."""
PERMUTATIONS = frozenset({_aten.randperm.default, _aten.randperm.generator})
"""Operators whose result is the order of uniform numbers."""


def draw_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Draw, Use]:
    """Return the draw of a call of a random operator, and a function of it that returns its result.

    Args:
        operator: the operator, or `truncated_normal`.
        args: its arguments, tensors included.
        kwargs: likewise; a generator is ignored.

    Raises:
        Unsupported: the operator has no such form.
    """
    rule = _RULES.get(operator)
    if rule is None:
        raise Unsupported(f"it is drawn by {operator}, which cannot be drawn element by element")
    options = {name: value for name, value in kwargs.items() if name != "generator"}
    draw, use = rule(*args, **options)
    if draw.dtype.is_complex:
        raise Unsupported("its random numbers are complex")
    return draw, use


def _in_place(distribution: Distribution, *defaults: float) -> Callable[..., tuple[Draw, Use]]:
    """Return the rule of an operator that fills a tensor."""

    def rule(x: Tensor, *args: float, **kwargs: float) -> tuple[Draw, Use]:
        given = [float(value) for value in (*args, *kwargs.values())]
        parameters = (*given, *defaults[len(given) :])
        return Draw(distribution, parameters, tuple(x.shape), x.dtype), x.copy_

    return rule


def _factory(distribution: Distribution, *parameters: float) -> Callable[..., tuple[Draw, Use]]:
    """Return the rule of an operator that takes a size."""

    def rule(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> tuple[Draw, Use]:
        kept = dtype or torch.get_default_dtype()
        return Draw(distribution, parameters, tuple(size), kept), _unchanged

    return rule


def _like(distribution: Distribution, *parameters: float) -> Callable[..., tuple[Draw, Use]]:
    """Return the rule of an operator that takes a tensor of the result's shape."""

    def rule(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> tuple[Draw, Use]:
        return Draw(distribution, parameters, tuple(x.shape), dtype or x.dtype), _unchanged

    return rule


def _unchanged(draw: Tensor) -> Tensor:
    return draw.clone()


def _truncated(x: Tensor, *parameters: float) -> tuple[Draw, Use]:
    return Draw("truncated normal", parameters, tuple(x.shape), x.dtype), x.copy_


def _bernoulli_p(x: Tensor, p: float) -> tuple[Draw, Use]:
    return Draw("bernoulli", (p,), tuple(x.shape), x.dtype), _unchanged


def _normal_of(mean: Tensor | float, std: Tensor | float = 1.0) -> tuple[Draw, Use]:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = (tensors[0] + tensors[-1]).shape
    draw = Draw("normal", (0.0, 1.0), tuple(shape), tensors[0].dtype)
    return draw, lambda drawn: drawn * std + mean


def _randint(high: int, size: list[int], **options: Any) -> tuple[Draw, Use]:
    return _randint_low(0, high, size, **options)


def _randint_low(
    low: int, high: int, size: list[int], *, dtype: torch.dtype | None = None, **_: Any
) -> tuple[Draw, Use]:
    parameters = (float(low), float(high))
    return Draw("integers", parameters, tuple(size), dtype or torch.int64), _unchanged


def _randint_like(x: Tensor, *bounds: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return _randint_low(low, high, list(x.shape), dtype=dtype or x.dtype)


def _random(x: Tensor, low: int = 0, high: int | None = None) -> tuple[Draw, Use]:
    if high is None:
        digits = torch.finfo(x.dtype).eps if x.is_floating_point() else None
        high = int(2 / digits) + 1 if digits is not None else torch.iinfo(x.dtype).max + 1
        high = min(high, 2**53)
    parameters = (float(low), float(high))
    return Draw("integers", parameters, tuple(x.shape), x.dtype), x.copy_


def _random_to(x: Tensor, high: int) -> tuple[Draw, Use]:
    return _random(x, 0, high)


def _randperm(n: int, *, dtype: torch.dtype | None = None, **_: Any) -> tuple[Draw, Use]:
    draw = Draw("uniform", (0.0, 1.0), (n,), torch.float64)
    return draw, lambda drawn: drawn.argsort(stable=True).to(dtype or torch.int64)


_RULES: Mapping[Any, Callable[..., tuple[Draw, Use]]] = {
    truncated_normal: _truncated,
    _aten.uniform_.default: _in_place("uniform", 0.0, 1.0),
    _aten.normal_.default: _in_place("normal", 0.0, 1.0),
    _aten.log_normal_.default: _in_place("log normal", 1.0, 2.0),
    _aten.exponential_.default: _in_place("exponential", 1.0),
    _aten.bernoulli_.float: _in_place("bernoulli", 0.5),
    _aten.geometric_.default: _in_place("geometric"),
    _aten.cauchy_.default: _in_place("cauchy", 0.0, 1.0),
    _aten.random_.default: _random,
    _aten.random_.to: _random_to,
    getattr(_aten.random_, "from"): _random,
    _aten.bernoulli.p: _bernoulli_p,
    _aten.normal.Tensor_float: _normal_of,
    _aten.normal.float_Tensor: _normal_of,
    _aten.normal.Tensor_Tensor: _normal_of,
    _aten.rand.default: _factory("uniform", 0.0, 1.0),
    _aten.rand.generator: _factory("uniform", 0.0, 1.0),
    _aten.randn.default: _factory("normal", 0.0, 1.0),
    _aten.randn.generator: _factory("normal", 0.0, 1.0),
    _aten.rand_like.default: _like("uniform", 0.0, 1.0),
    _aten.randn_like.default: _like("normal", 0.0, 1.0),
    _aten.randint.default: _randint,
    _aten.randint.low: _randint_low,
    _aten.randint.generator: _randint,
    _aten.randint.low_generator: _randint_low,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like,
    _aten.randperm.default: _randperm,
    _aten.randperm.generator: _randperm,
}
"""Random operator -> its rule, called with the operator's arguments."""
