"""The differences in a compiled graph's values that rounding alone explains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.launching.node.graph_comparison import EXPLAINED
from trainload.launching.verification.rounding import explained_distances, rounded_runs


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
    """An example is the mean of a BatchNorm's outputs.

    It is 1e-16 in float64, and 1e-7 to 3e-6 in float32, depending on the order of the sum.
    """
    assert 100 < explained(noise(0, 1e-7), 1e-7) < 1e4


def results(run: Any) -> list[Tensor]:
    """Return the results of a run of a graph with one output."""
    return [run]


class Kinked(nn.Module):
    """The gradient of ReLU at an input that is zero except for rounding: 1 or 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0 - 1.0 > 0).to(torch.float32)


def test_a_jump_that_rounding_may_cause_is_explained_by_further_runs() -> None:
    graph = symbolic_trace(Kinked())
    given = torch.full((8,), 1e-7)  # 1 + 1e-7 rounds to 1 + one unit in the last place
    value = graph(given)
    (distance,) = explained_distances(
        [value],
        [results(run) for _, run in rounded_runs(graph, lambda: [given], further=True)],
        further=True,
    )
    assert distance > 0.5


def test_a_smooth_value_may_differ_by_no_more_in_further_runs() -> None:
    value = noise(0, 1.0)
    (distance,) = explained_distances(
        [value], [[value + noise(seed, 1e-3)] for seed in range(6)], further=True
    )
    assert 1e-3 < distance < 1e-2


class Mean(nn.Module):
    """The mean of many numbers with the same sign."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_a_sum_may_be_computed_one_term_after_another() -> None:
    values = torch.rand(2**20, generator=torch.Generator().manual_seed(0))
    graph = symbolic_trace(Mean())
    expected = graph(values)
    lanes = values.reshape(-1, 8).cumsum(0)[-1].sum() / len(values)
    (distance,) = explained_distances(
        [expected],
        [results(run) for _, run in rounded_runs(graph, lambda: [values], further=True)],
        further=True,
    )
    assert float((lanes - expected).abs() / expected) < distance < 1e-2


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("normalization", "groups"),
    [
        (nn.BatchNorm2d(4), lambda x: x.transpose(0, 1).reshape(4, -1)),
        (nn.LayerNorm([4, 32, 32]), lambda x: x.reshape(6, -1)),
        (nn.LayerNorm([32, 32]), lambda x: x.reshape(24, -1)),
        (nn.GroupNorm(2, 4), lambda x: x.reshape(12, -1)),
    ],
    ids=["batch", "layer", "layer of two dims", "group"],
)
def test_elements_that_are_normalized_together_share_the_error_of_their_mean(
    normalization: nn.Module, groups: Any, backward: bool
) -> None:
    """A later mean retains this error, while independent errors of elements would cancel out."""

    def value(x: Tensor) -> Tensor:
        if not backward:
            output: Tensor = normalization(x)
            return output
        (gradient,) = torch.autograd.grad((normalization(x) * x.roll(1)).sum(), x)
        return gradient

    given = torch.randn(
        6, 4, 32, 32, generator=torch.Generator().manual_seed(0), requires_grad=backward
    )
    graph = make_fx(value, tracing_mode="real")(given)
    with torch.no_grad():
        expected = groups(graph(given)).double().mean(1)
        runs = [
            groups(run).double().mean(1)
            for _, run in rounded_runs(graph, lambda: [given], further=True)
        ]
    error = max(float((run - expected).abs().max()) for run in runs)
    assert 10 * torch.finfo(torch.float32).eps * 0.9 < error < 1e-4
