"""Values of draws: functions of (seed, draw, logical element index)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainload.autograd_trace.initialization.normal_quantile import logarithm, normal_quantile
from trainload.autograd_trace.randomness.random_key import RandomKey
from trainload.capture.initialization.construction_draws import Distribution, Draw

_STEP = -1
"""Step of the random key: no step of training has it."""
_SITES = 2
"""Sites of a draw."""


def drawn_values(draw: Draw, number: int, seed: int, index: Tensor) -> Tensor:
    """Return some elements of a draw.

    Args:
        draw: the draw.
        number: its number in the job.
        seed: any int64.
        index: int64 (n,): the elements' places in the flattened tensor.

    Returns:
        (n,), of the draw's dtype, computed in float64.
    """
    zero = torch.zeros((), dtype=torch.int64)
    key = RandomKey.of(torch.tensor(seed, dtype=torch.int64), zero + _STEP, zero, 1)
    words = (key.words_at(number * _SITES, index).to(torch.int64) & 0xFFFFFFFF).to(torch.float64)
    if draw.distribution == "integers":
        low, high = draw.parameters
        more = key.words_at(number * _SITES + 1, index).to(torch.int64) & 0x1FFFFF
        share = (words + more.to(torch.float64) * 2.0**-21) * 2.0**-32  # 53 bits
        return (share * (high - low) + low).floor().clamp(max=high - 1).to(draw.dtype)
    return _RULES[draw.distribution](words * 2.0**-32, *draw.parameters).to(draw.dtype)


_HALF = 2.0**-33
"""Half of the distance of two uniform numbers: puts them between 0 and 1, both excluded."""


def _uniform(u: Tensor, low: float, high: float) -> Tensor:
    return u * (high - low) + low


def _normal(u: Tensor, mean: float, std: float) -> Tensor:
    return normal_quantile(u + _HALF).mul_(std).add_(mean)


def _truncated_normal(u: Tensor, mean: float, std: float, low: float, high: float) -> Tensor:
    below, above = (_normal_share((bound - mean) / std) for bound in (low, high))
    quantiles = normal_quantile((u + _HALF) * (above - below) + below)
    return quantiles.mul_(std).add_(mean).clamp_(low, high)


def _normal_share(x: float) -> float:
    return math.erfc(-x / math.sqrt(2.0)) / 2.0


def _exponential(u: Tensor, rate: float) -> Tensor:
    return -logarithm(u + _HALF) / rate


def _geometric(u: Tensor, p: float) -> Tensor:
    if p == 1.0:
        return torch.ones_like(u)
    return (logarithm(u + _HALF) / math.log1p(-p)).ceil_().clamp_(min=1.0)


def _cauchy(u: Tensor, median: float, scale: float) -> Tensor:
    return ((u + _HALF - 0.5) * math.pi).tan_().mul_(scale).add_(median)


_RULES: Mapping[Distribution, Callable[..., Tensor]] = {
    "uniform": _uniform,
    "normal": _normal,
    "truncated normal": _truncated_normal,
    "log normal": lambda u, mean, std: _normal(u, mean, std).exp_(),
    "exponential": _exponential,
    "bernoulli": lambda u, p: u < p,
    "geometric": _geometric,
    "cauchy": _cauchy,
}
"""Distribution -> its value at uniform numbers in [0, 1): float64 (n,) -> (n,)."""
