"""How far rounding alone may move a value of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from trainload.launching.worker.rounding import EXPLAINED, explained_distances


def noise(seed: int, size: float) -> Tensor:
    return torch.randn(96, generator=torch.Generator().manual_seed(seed)) * size


def explained(value: Tensor, error: float) -> float:
    (distance,) = explained_distances([value], [[value + noise(seed, error)] for seed in (1, 2)])
    return distance


def test_a_value_that_rounding_leaves_alone_may_differ_by_float32s_own() -> None:
    value = noise(0, 1.0)
    assert explained_distances([value], [[value], [value]]) == [EXPLAINED]


def test_a_value_with_digits_may_differ_by_ten_times_its_rounding() -> None:
    assert 5e-3 < explained(noise(0, 1.0), 1e-3) < 2e-2


def test_a_value_of_rounding_errors_may_differ_by_many_times_itself() -> None:
    """Such as the mean of what a BatchNorm has normalised: 1e-16 in float64, 1e-7 to 3e-6 in float32, by the order of the sum."""
    assert 100 < explained(noise(0, 1e-7), 1e-7) < 1e4
