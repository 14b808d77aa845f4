"""Stateless random numbers are uniform, independent and the same however a batch is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainload.autograd_trace.randomness.random_key import RandomKey, mix, mix_words

SHAPE = (64, 32, 16)


def key(seed: int = 1, step: int = 0, row: int = 0, rows: int = 64) -> RandomKey:
    return RandomKey.of(torch.tensor(seed), torch.tensor(step), torch.tensor(row), rows)


def uniform(
    k: RandomKey, site: int = 0, shape: tuple[int, ...] = SHAPE, dim: int | None = 0
) -> Tensor:
    return k.uniform(site, shape, dim, torch.float64)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_mixing_is_one_to_one() -> None:
    assert len(set(mix(torch.arange(1 << 16)).tolist())) == 1 << 16


def test_mixing_stays_in_32_bits() -> None:
    mixed = mix(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert bool(((mixed >= 0) & (mixed < 2**32)).all())


def test_words_are_mixed_as_64_bit_numbers_are() -> None:
    numbers = torch.cat(
        [
            torch.arange(1 << 16),
            torch.arange(2**32 - (1 << 16), 2**32),
            torch.arange(0, 2**32, 9973),
        ]
    )
    mixed = mix_words(numbers.to(torch.int32)).to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(mixed, mix(numbers))


def bits_in_64_bit_integers(
    k: RandomKey, site: int, count: int, first: int, shape: tuple[int, ...]
) -> Tensor:
    """Compute `RandomKey.bits` of elements from `first` on with exact integers."""
    mask = 2**32 - 1
    index = torch.arange(first, first + count)
    own = mix((k.key + site * 0x9E3779B9) & mask)
    other = mix((own + 0x9E3779B9) & mask)
    return mix((mix((index & mask) ^ own) + other + (index >> 32)) & mask).view(shape)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**40),
    site=st.integers(0, 2**20),
    row=st.integers(0, 2**40),
)
def test_bits_are_those_of_the_documented_function(
    seed: int, step: int, site: int, row: int
) -> None:
    k = key(seed, step, row, rows=4)
    expected = bits_in_64_bit_integers(k, site, 4 * 6, row * 6, (4, 2, 3))
    assert torch.equal(k.bits(site, (4, 2, 3), 0), expected)


@pytest.mark.parametrize("p", [0.0, 2.0**-33, 0.3, 0.5, 1 - 2.0**-32, 1.0])
def test_a_value_is_kept_if_its_bits_are_at_least_p(p: float) -> None:
    k = key()
    kept = k.keep(3, SHAPE, 0, p)
    assert torch.equal(kept, k.bits(3, SHAPE, 0) >= round(p * 2**32))


@pytest.mark.parametrize("seed", [0, 1, 2**40, -5, 2**63 - 1])
def test_values_are_uniform(seed: int) -> None:
    values = uniform(key(seed))
    counts = torch.histc(values, 64, 0, 1)
    expected = values.numel() / 64
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_is_fair(bit: int) -> None:
    bits = (key().bits(0, SHAPE, 0) >> bit) & 1
    assert abs(float(bits.double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(bits.numel())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (uniform(key()), uniform(key(), site=1)),
        (uniform(key()), uniform(key(step=1))),
        (uniform(key()), uniform(key(seed=2))),
        (uniform(key()), uniform(key(seed=1 + 2**32))),
        (uniform(key(step=1), site=0), uniform(key(step=0), site=1)),
        (uniform(key())[:-1], uniform(key())[1:]),
        (uniform(key())[..., :-1], uniform(key())[..., 1:]),
        (uniform(key()), uniform(key(row=64))),
    ],
    ids=["sites", "steps", "seeds", "high seeds", "step and site", "rows", "columns", "calls"],
)
def test_values_are_independent(one: Tensor, other: Tensor) -> None:
    assert abs(correlation(one, other)) < 5 / math.sqrt(one.numel())


@pytest.mark.parametrize(
    ("shape", "dim"), [((8, 5, 3), 0), ((5, 8, 3), 1), ((5, 3, 8), 2), ((24, 5), 0), ((5, 16), 1)]
)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_split_batch_has_the_numbers_of_the_whole(
    shape: tuple[int, ...], dim: int, parts: int
) -> None:
    whole = uniform(key(rows=8), shape=shape, dim=dim)
    rows = 8 // parts
    pieces = []
    for part in range(parts):
        local = list(shape)
        local[dim] //= parts
        pieces.append(uniform(key(row=part * rows, rows=rows), shape=tuple(local), dim=dim))
    assert torch.equal(torch.cat(pieces, dim), whole)


def test_a_value_without_rows_does_not_depend_on_the_split() -> None:
    assert torch.equal(
        uniform(key(row=0, rows=8), shape=(5, 3), dim=None),
        uniform(key(row=4, rows=4), shape=(5, 3), dim=None),
    )


def test_a_call_of_fixed_size_has_numbers_of_its_own() -> None:
    first, second = (
        uniform(key(row=0).of_call(), dim=None),
        uniform(key(row=64).of_call(), dim=None),
    )
    assert abs(correlation(first, second)) < 5 / math.sqrt(first.numel())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_keep_rate_is_what_was_asked_for(p: float) -> None:
    kept = key().keep(0, (256, 32, 16), 0, p)
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_values_are_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    values = key().uniform(0, (256, 32, 16), 0, dtype)
    assert values.dtype is dtype
    assert float(values.min()) >= 0 and float(values.max()) < 1


def test_normal_values_have_mean_zero_and_variance_one() -> None:
    values = key().normal(0, (256, 32, 16), 0, torch.float64)
    assert abs(float(values.mean())) < 5 / math.sqrt(values.numel())
    assert abs(float(values.var()) - 1) < 5 * math.sqrt(2 / values.numel())
    assert bool(values.isfinite().all())
