"""Draws: functions of a seed, a draw and an element's place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainload.autograd_trace.initialization.drawn_values import drawn_values
from trainload.capture.initialization.construction_draws import Distribution, Draw

COUNT = 2**16
INDEX = torch.arange(COUNT)
TORCHS: dict[Distribution, tuple[tuple[float, ...], Callable[[Tensor], Tensor]]] = {
    "uniform": ((-0.25, 0.5), lambda x: x.uniform_(-0.25, 0.5)),
    "normal": ((1.0, 0.02), lambda x: x.normal_(1.0, 0.02)),
    "truncated normal": (
        (0.0, 1.0, -0.5, 2.0),
        lambda x: torch.nn.init.trunc_normal_(x, 0.0, 1.0, -0.5, 2.0),
    ),
    "log normal": ((1.0, 0.5), lambda x: x.log_normal_(1.0, 0.5)),
    "exponential": ((2.0,), lambda x: x.exponential_(2.0)),
    "bernoulli": ((0.3,), lambda x: x.bernoulli_(0.3)),
    "geometric": ((0.3,), lambda x: x.geometric_(0.3)),
    "cauchy": ((0.0, 2.0), lambda x: x.cauchy_(0.0, 2.0)),
    "integers": ((-3.0, 4.0), lambda x: x.random_(-3, 4)),
}


def draw(kind: Distribution, dtype: torch.dtype = torch.float32) -> Draw:
    return Draw(kind, TORCHS[kind][0], (COUNT,), dtype)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the greatest difference of two empirical distribution functions."""
    both = torch.cat([a, b]).sort().values
    shares = [
        torch.searchsorted(x.sort().values, both, right=True).double() / len(x) for x in (a, b)
    ]
    return float((shares[0] - shares[1]).abs().max())


@pytest.mark.parametrize("kind", TORCHS)
def test_their_distribution_is_torchs(kind: Distribution) -> None:
    torch.manual_seed(0)
    theirs = TORCHS[kind][1](torch.empty(COUNT))
    ours = drawn_values(draw(kind), 5, 1, INDEX)
    assert distance(ours.double(), theirs.double()) < 0.012  # chance: about 1 in 10**4


@pytest.mark.parametrize("kind", TORCHS)
def test_an_element_does_not_depend_on_the_others(kind: Distribution) -> None:
    whole = drawn_values(draw(kind), 5, 1, INDEX)
    some = torch.tensor([3, 17, 40_000, 3])
    assert torch.equal(drawn_values(draw(kind), 5, 1, some), whole[some])


def test_elements_beyond_32_bits_differ() -> None:
    near, far = (drawn_values(draw("normal"), 0, 0, INDEX + offset) for offset in (0, 2**32))
    assert abs(float(torch.corrcoef(torch.stack([near, far]))[0, 1])) < 0.02


@pytest.mark.parametrize(("number", "seed"), [(0, 1), (1, 0), (0, 2**40)])
def test_other_draws_and_seeds_are_independent(number: int, seed: int) -> None:
    first = drawn_values(draw("normal"), 0, 0, INDEX)
    other = drawn_values(draw("normal"), number, seed, INDEX)
    assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_they_are_computed_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    exact = drawn_values(draw("normal", torch.float64), 0, 0, INDEX)
    assert torch.equal(drawn_values(draw("normal", dtype), 0, 0, INDEX), exact.to(dtype))


def test_a_normal_draw_has_tails() -> None:
    values = drawn_values(
        Draw("normal", (0.0, 1.0), (2**21,), torch.float32), 0, 0, torch.arange(2**21)
    )
    assert 4.5 < float(values.abs().max()) < 6.7
    assert abs(float(values.std()) - 1) < 0.002
