"""Factors: tied dims, and their composition."""

from __future__ import annotations

import pytest
from sympy import Symbol

from trainload.sharding.tensor.factors import Dim, Factors

ROWS = Symbol("s0", positive=True, integer=True)


@pytest.fixture
def factors() -> Factors:
    return Factors()


def lengths(factors: Factors, dim: Dim) -> list[object]:
    return [factor.size for factor in factors.leaves(dim)]


def test_a_dim_of_one_element_has_no_factor(factors: Factors) -> None:
    assert [len(dim) for dim in factors.dims([1, 3])] == [0, 1]


def test_what_is_tied_has_the_same_factors(factors: Factors) -> None:
    one, other = factors.dim(6), factors.dim(6)
    factors.tie(one, other)
    assert factors.leaves(one) == factors.leaves(other)


def test_a_view_divides_a_dim_and_all_that_is_tied_to_it(factors: Factors) -> None:
    fused, weight = factors.dim(96), factors.dim(96)
    factors.tie(fused, weight)
    made = factors.regroup((fused,), [3, 2, 16])
    assert made is not None
    assert lengths(factors, weight) == [3, 2, 16]
    assert factors.leaves(weight) == tuple(f for dim in made for f in factors.leaves(dim))


def test_divisions_of_tied_dims_meet(factors: Factors) -> None:
    one, other = factors.dim(24), factors.dim(24)
    factors.regroup((one,), [4, 6])
    factors.regroup((other,), [2, 12])
    factors.tie(one, other)
    assert lengths(factors, one) == lengths(factors, other) == [2, 2, 6]
    assert factors.leaves(one) == factors.leaves(other)


def test_divisions_without_common_factors_are_broken(factors: Factors) -> None:
    one, other = factors.dim(6), factors.dim(6)
    factors.regroup((one,), [2, 3])
    factors.regroup((other,), [3, 2])
    factors.tie(one, other)
    assert all(factors.is_broken(f) for f in (*one, *other))


def test_what_is_broken_stays_so_when_it_is_tied_or_divided(factors: Factors) -> None:
    one, other, later = factors.dim(12), factors.dim(12), factors.dim(4)
    first = factors.regroup((one,), [3, 4])
    factors.regroup((other,), [4, 3])
    factors.tie(one, other)
    assert first is not None
    factors.tie(first[1], later)
    factors.regroup((later,), [2, 2])
    assert all(factors.is_broken(f) for f in factors.leaves(later))


def test_a_view_across_dims_is_not_followed(factors: Factors) -> None:
    assert factors.regroup(factors.dims([4, 6]), [3, 8]) is None


@pytest.mark.parametrize("shape", [[ROWS * 16, 32], [ROWS, 16, 2, 16], [ROWS * 512]], ids=str)
def test_rows_of_any_number_are_kept_apart(factors: Factors, shape: list[object]) -> None:
    dims = factors.dims([ROWS, 16, 32])
    made = factors.regroup(dims, shape)
    assert made is not None
    assert [f for dim in made for f in factors.leaves(dim)] == [
        f for dim in dims for f in factors.leaves(dim)
    ]
