"""The stateless forms of random operators have the distributions of torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainload.autograd_trace.randomness.draws import RANDOM
from trainload.autograd_trace.randomness.random_key import RandomKey

aten = torch.ops.aten


class Run:
    """Arguments of a random operator from an interpreter, for rows in the first dim."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._site = 0

    def key(self) -> RandomKey:
        return RandomKey.of(torch.tensor(1), torch.tensor(2), torch.tensor(0), self._rows)

    def site(self, count: int = 1) -> int:
        self._site += count
        return self._site - count

    def batch_dim(self) -> int | None:
        return 0


def drawn(operator: Any, x: Tensor, *arguments: Any) -> Tensor:
    result: Tensor = RANDOM[operator](Run(x.shape[0]), x, *arguments)
    return result


@pytest.fixture
def normal() -> Tensor:
    return torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))


def test_alpha_dropout_keeps_mean_and_variance(normal: Tensor) -> None:
    out = drawn(aten.alpha_dropout.default, normal, 0.3, True)
    assert abs(float(out.mean())) < 0.02
    assert abs(float(out.var()) - 1) < 0.03
    assert abs(float((out == out.mode(0).values).float().mean()) - 0.3) < 0.01


def test_alpha_dropout_of_features_drops_whole_ones(normal: Tensor) -> None:
    out = drawn(aten.feature_alpha_dropout.default, normal.view(-1, 4, 2), 0.5, True)
    dropped = out == out.flatten().mode().values
    assert torch.equal(dropped[..., 0], dropped[..., 1])
    assert abs(float(dropped.float().mean()) - 0.5) < 0.02


def test_rrelu_has_slopes_between_its_bounds(normal: Tensor) -> None:
    out = drawn(aten.rrelu.default, normal, 0.2, 0.6, True)
    assert torch.equal(out[normal > 0], normal[normal > 0])
    slopes = (out / normal)[normal < 0]
    assert 0.2 - 1e-6 <= float(slopes.min()) < 0.21 and 0.59 < float(slopes.max()) <= 0.6 + 1e-6


def test_rrelu_outside_of_training_has_the_mean_slope(normal: Tensor) -> None:
    torch.testing.assert_close(
        drawn(aten.rrelu.default, normal, 0.2, 0.6, False),
        torch.nn.functional.rrelu(normal, 0.2, 0.6, False),
    )


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_draws_as_often_as_the_weights_say(replacement: bool) -> None:
    places = drawn(
        aten.multinomial.default, torch.tensor([1.0, 3.0, 0.0]).expand(8000, 3), 1, replacement
    )
    counts = torch.bincount(places.flatten(), minlength=3) / 8000
    torch.testing.assert_close(counts, torch.tensor([0.25, 0.75, 0.0]), atol=0.02, rtol=0)


def test_multinomial_without_replacement_draws_no_place_twice() -> None:
    places = drawn(aten.multinomial.default, torch.ones(500, 4), 3, False)
    assert bool((places.sort(-1).values.diff() > 0).all())


def test_multinomial_with_replacement_draws_independently() -> None:
    places = drawn(aten.multinomial.default, torch.ones(8000, 2), 2, True).double()
    assert abs(float(torch.corrcoef(places.t())[0, 1])) < 0.05


def test_a_drawn_permutation_holds_every_number_once() -> None:
    places: Tensor = RANDOM[aten.randperm.default](Run(1), 50)
    assert sorted(places.tolist()) == list(range(50))
    assert places.tolist() != list(range(50))


def test_normal_of_tensors_has_their_means_and_deviations() -> None:
    out = drawn(aten.normal.Tensor_Tensor, torch.full((8000,), 3.0), torch.full((8000,), 0.5))
    assert abs(float(out.mean()) - 3) < 0.03
    assert abs(float(out.std()) - 0.5) < 0.02


def test_a_probability_for_each_element_is_its_own() -> None:
    out = drawn(aten.bernoulli_.Tensor, torch.zeros(8000, 2), torch.tensor([0.1, 0.8]))
    torch.testing.assert_close(out.mean(0), torch.tensor([0.1, 0.8]), atol=0.02, rtol=0)


def test_recurrent_dropout_stands_between_the_layers() -> None:
    torch.manual_seed(0)
    layers = torch.nn.LSTM(3, 3, 2, batch_first=True)
    x, state = torch.randn(5, 4, 3), [torch.zeros(2, 5, 3), torch.zeros(2, 5, 3)]
    call = (layers._flat_weights, True, 2)
    plain = RANDOM[aten.lstm.input](Run(5), x, state, *call, 0.0, True, False, True)
    dropped = RANDOM[aten.lstm.input](Run(5), x, state, *call, 0.5, True, False, True)
    for value, expected in zip(plain, (layers(x)[0], *layers(x)[1]), strict=True):
        torch.testing.assert_close(value, expected)
    torch.testing.assert_close(dropped[1][0], plain[1][0])  # the last state of the first layer
    assert not torch.allclose(dropped[0], plain[0])


@pytest.mark.parametrize("rate", [0.0, 0.3, 4.0, 40.0, 3000.0])
def test_poisson_draws_have_the_mean_and_the_variance_of_their_rate(rate: float) -> None:
    out = drawn(aten.poisson.default, torch.full((4000, 8), rate))
    error = 6 * (rate / out.numel()) ** 0.5
    assert abs(float(out.mean()) - rate) <= error
    assert abs(float(out.var()) - rate) <= rate * 0.06
    assert torch.equal(out, out.floor())


def test_poisson_draws_have_torchs_probabilities() -> None:
    out = drawn(aten.poisson.default, torch.full((4000, 8), 2.5))
    counts = torch.arange(8.0)
    expected = (counts * math.log(2.5) - 2.5 - torch.lgamma(counts + 1)).exp()
    found = torch.stack([(out == count).float().mean() for count in range(8)])
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("concentration", [0.05, 0.4, 1.0, 7.0, 300.0])
def test_gamma_draws_are_spread_as_their_distribution_says(concentration: float) -> None:
    given = torch.full((4000, 8), concentration, dtype=torch.float64)
    below = torch.special.gammainc(given, drawn(aten._standard_gamma.default, given))
    assert abs(float(below.mean()) - 0.5) < 0.01
    assert abs(float(below.var()) - 1 / 12) < 0.003


def test_dirichlet_draws_have_their_means_and_sum_to_one() -> None:
    given = torch.tensor([0.2, 1.0, 2.8]).expand(8000, 3)
    out = drawn(torch.ops.trainload.dirichlet.default, given)
    torch.testing.assert_close(out.sum(-1), torch.ones(8000))
    torch.testing.assert_close(out.mean(0), given[0] / 4, atol=0.02, rtol=0)


def test_dropout_keeps_each_element_or_each_feature_with_its_probability(normal: Tensor) -> None:
    ones = torch.ones(4000, 4, 2)
    for operator in (aten.dropout.default, aten.feature_dropout.default):
        out = drawn(operator, ones, 0.25, True)
        assert set(out.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert abs(float((out == 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(out[..., 0], out[..., 1])  # whole features are dropped
    out, kept = RANDOM[aten.native_dropout.default](Run(4000), normal, 0.25, True)
    torch.testing.assert_close(out, torch.where(kept, normal / 0.75, torch.zeros(())))


@pytest.mark.parametrize(
    ("p", "train", "factor"), [(0.0, True, 1.0), (0.5, False, 1.0), (1.0, True, 0.0)]
)
def test_dropout_of_nothing_or_of_everything_draws_nothing(
    normal: Tensor, p: float, train: bool, factor: float
) -> None:
    for operator in (
        aten.dropout.default,
        aten.alpha_dropout.default,
        aten.feature_dropout.default,
    ):
        assert torch.equal(drawn(operator, normal, p, train), normal * factor)
    assert torch.equal(drawn(aten.native_dropout.default, normal, p, train)[0], normal * factor)


def test_bernoulli_draws_ones_with_their_probabilities() -> None:
    chances = torch.tensor([0.1, 0.8]).expand(8000, 2)
    torch.testing.assert_close(
        drawn(aten.bernoulli.default, chances).mean(0), chances[0], atol=0.02, rtol=0
    )
    assert abs(float(drawn(aten.bernoulli.p, torch.zeros(8000), 0.3).mean()) - 0.3) < 0.02


UNIFORM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: RANDOM[aten.rand.default](Run(len(x)), list(x.shape)),
    "rand_like": lambda x: drawn(aten.rand_like.default, x),
    "uniform_": lambda x: (drawn(aten.uniform_.default, x.clone(), -2.0, 4.0) + 2) / 6,
    # mapped by its distribution function
    "exponential_": lambda x: 1 - (-3 * drawn(aten.exponential_.default, x.clone(), 3.0)).exp(),
}
NORMAL: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: RANDOM[aten.randn.default](Run(len(x)), list(x.shape)),
    "randn_like": lambda x: drawn(aten.randn_like.default, x),
    "normal_": lambda x: (drawn(aten.normal_.default, x.clone(), 3.0, 0.5) - 3) / 0.5,
}


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform_draws_fill_their_interval_evenly(normal: Tensor, name: str) -> None:
    out = UNIFORM[name](normal)
    assert out.shape == normal.shape
    torch.testing.assert_close(
        torch.histc(out, 4, 0, 1) / out.numel(), torch.full((4,), 0.25), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("name", NORMAL)
def test_normal_draws_have_the_quantiles_of_their_distribution(normal: Tensor, name: str) -> None:
    out = torch.special.ndtr(NORMAL[name](normal))
    torch.testing.assert_close(
        torch.histc(out, 4, 0, 1) / out.numel(), torch.full((4,), 0.25), atol=0.01, rtol=0
    )


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "randint": lambda x: RANDOM[aten.randint.default](Run(len(x)), 5, list(x.shape)) + 2,
    "randint between": lambda x: RANDOM[aten.randint.low](Run(len(x)), 2, 7, list(x.shape)),
    "randint_like": lambda x: drawn(aten.randint_like.default, x, 5) + 2,
    "randint_like between": lambda x: drawn(aten.randint_like.low_dtype, x, 2, 7),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_drawn_evenly_between_their_bounds(normal: Tensor, name: str) -> None:
    counts = torch.bincount(INTEGERS[name](normal).long().flatten(), minlength=8) / normal.numel()
    torch.testing.assert_close(
        counts, torch.tensor([0, 0, 0.2, 0.2, 0.2, 0.2, 0.2, 0]), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("masked", ["not at all", "causally", "by booleans", "by numbers"])
def test_attention_with_dropout_is_on_average_attention_without_it(masked: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 5, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 5, 8, generator=generator)  # half as many heads as `query`
    seen = torch.rand(5, 5, generator=generator) > 0.4
    seen[2] = False  # this query attends to nothing
    mask = {"by booleans": seen, "by numbers": torch.where(seen, 0.5, float("-inf"))}.get(masked)
    options = {"is_causal": masked == "causally", "enable_gqa": True}
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, 0.0, **options
    )
    rows = [x.expand(3000, *x.shape[1:]) for x in (query, key, value)]
    out = RANDOM[aten.scaled_dot_product_attention.default](
        Run(3000), *rows, mask, 0.2, options["is_causal"], enable_gqa=True
    )
    assert not torch.allclose(out[0], out[1])
    torch.testing.assert_close(out.mean(0), whole[0], atol=0.05, rtol=0)
    plain = RANDOM[aten.scaled_dot_product_attention.default](
        Run(1), query, key, value, mask, 0.0, options["is_causal"], enable_gqa=True
    )
    torch.testing.assert_close(plain, whole)


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_with_dropout_in_bfloat16_is_rounded_once(autocast: bool) -> None:
    query, key, value = (torch.randn(40, 4, 9, 8) * scale for scale in (3, 3, 1))
    attention = RANDOM[aten.scaled_dot_product_attention.default]
    low = [x.bfloat16() for x in (query, key, value)]
    expected = attention(Run(40), *(x.float() for x in low), None, 0.2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = attention(Run(40), *([query, key, value] if autocast else low), None, 0.2)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0)
