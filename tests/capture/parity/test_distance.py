"""The distance that graphs are compared by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainload.capture.parity.distance import (
    absolute_distance,
    noise_floor,
    norm_of,
    relative_distance,
)

INF, NAN = float("inf"), float("nan")
LARGE = torch.randn(700, 1001, generator=torch.Generator().manual_seed(0))
"""Tensor larger than a block, and not a multiple of the block size."""


@pytest.mark.parametrize(
    "tensor",
    [LARGE, LARGE.T, LARGE.to(torch.bfloat16), LARGE[0].expand(700, 1001)],
    ids=["", "strides", "bf16", "same"],
)
def test_blocks_give_the_distance_of_the_whole(tensor: Tensor) -> None:
    moved = tensor + 0.01 * LARGE.T.reshape(tensor.shape).to(tensor.dtype)
    whole = (tensor.double() - moved.double()).norm()
    assert absolute_distance(tensor, moved) == pytest.approx(float(whole), rel=1e-12)
    assert relative_distance(tensor, moved) == pytest.approx(
        float(whole / tensor.double().norm()), rel=1e-12
    )


def test_one_entry_in_the_last_block_counts() -> None:
    moved = LARGE.clone()
    moved[-1, -1] += 1
    assert absolute_distance(LARGE, moved) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [NAN, 1.0]),
        ([INF, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [INF, 1.0]),
        ([INF, 1.0], [-INF, 1.0]),
    ],
)
def test_what_is_not_finite_must_stand_in_the_same_places(
    expected: list[float], got: list[float]
) -> None:
    assert relative_distance(torch.tensor(expected), torch.tensor(got)) == INF


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_finite_entries_count_beside_others(odd: float) -> None:
    assert relative_distance(torch.tensor([odd, 1.0]), torch.tensor([odd, 1.5])) == 0.5
    assert relative_distance(torch.tensor([odd, 1.0]), torch.tensor([odd, 1.0])) == 0.0


@pytest.mark.parametrize("odd", [NAN, INF])
def test_a_gradient_that_is_not_finite_does_not_hide_the_others(odd: float) -> None:
    gradients = [torch.tensor([odd, 3.0]), torch.tensor([4.0])]
    assert norm_of(gradients) == 5.0
    assert noise_floor(norm_of(gradients)) == pytest.approx(5e-6)


def test_a_float64_beyond_the_range_of_squares_is_compared() -> None:
    assert (
        relative_distance(
            torch.tensor([1e200], dtype=torch.float64), torch.tensor([2e200], dtype=torch.float64)
        )
        > 0.1
    )
