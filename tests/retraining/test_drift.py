"""Drift of a column's values: the population stability index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainload.core.canonical_json import canonical_json
from trainload.retraining.data.drift import MOST_VALUES, ColumnStatistics, Sampled, drift_of


def told(values: Any, dtype: str = "float32") -> ColumnStatistics:
    sampled = Sampled(dtype)
    sampled.add(np.asarray(values))
    return sampled.statistics()


def distance(before: ColumnStatistics, now: ColumnStatistics) -> float:
    return drift_of({"c": before}, {"c": now})["c"]


def normal(
    shift: float = 0.0, scale: float = 1.0, seed: int = 0, count: int = 20_000
) -> ColumnStatistics:
    return told(np.random.default_rng(seed).normal(shift, scale, count))


VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(0.0), min_size=1, max_size=60)


@given(VALUES)
def test_the_same_values_have_not_drifted(values: list[float]) -> None:
    assert distance(told(values), told(values)) == 0.0


@given(VALUES, VALUES)
def test_it_is_finite_and_not_negative(before: list[float], now: list[float]) -> None:
    found = distance(told(before), told(now))
    assert math.isfinite(found)
    assert found >= 0.0


def test_another_sample_of_the_same_is_below_what_is_little() -> None:
    assert distance(normal(), normal(seed=1)) < 0.01


@pytest.mark.parametrize("change", ["shift", "scale"])
def test_it_grows_with_the_change(change: str) -> None:
    steps = [
        normal(shift=each) if change == "shift" else normal(scale=1 + each)
        for each in (0.0, 0.25, 0.5, 1.0, 2.0)
    ]
    found = [distance(steps[0], each) for each in steps]
    assert found == sorted(found)
    assert found[-1] > 0.25


def test_half_a_deviation_is_what_theory_says() -> None:
    """For normal values a shift of d has Jeffreys divergence d^2; deciles lose a little of it."""
    assert distance(normal(), normal(shift=0.5)) == pytest.approx(0.25, abs=0.03)


def test_integers_of_few_values_are_counted() -> None:
    before, now = told([0] * 50 + [1] * 50, "int64"), told([0] * 80 + [1] * 20, "int64")
    assert before.counts == {"0": 50, "1": 50}
    assert distance(before, now) == pytest.approx(
        (0.5 - 0.8) * math.log(0.5 / 0.8) + (0.5 - 0.2) * math.log(0.5 / 0.2)
    )


def test_a_value_that_is_new_counts_much() -> None:
    assert distance(told([0, 1] * 50, "int64"), told([0, 2] * 50, "int64")) > 1.0


def test_integers_of_many_values_are_not_counted() -> None:
    assert told(np.arange(MOST_VALUES + 1), "int64").counts == {}


def test_many_become_few() -> None:
    assert distance(told(np.arange(100), "int64"), told([3] * 100, "int64")) > 1.0


def test_a_constant_has_not_drifted_from_itself_and_has_from_another() -> None:
    assert distance(told([2.0] * 9), told([2.0] * 40)) == 0.0
    assert distance(told([2.0] * 9), told([3.0] * 9)) > 1.0


def test_a_column_without_values_is_left_out() -> None:
    assert drift_of({"c": told([math.nan])}, {"c": normal()}) == {}


def test_columns_that_only_one_has_are_left_out() -> None:
    assert drift_of({"a": normal()}, {"b": normal()}) == {}


def test_what_is_no_number_is_counted_apart() -> None:
    found = told([1.0, math.nan, math.inf, 3.0])
    assert (found.count, found.broken, found.mean, found.least, found.greatest) == (
        4,
        2,
        2.0,
        1.0,
        3.0,
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=8))
def test_blocks_are_the_same_however_they_are_cut(sizes: list[int]) -> None:
    values = np.random.default_rng(0).normal(size=sum(sizes))
    sampled = Sampled("float64")
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        sampled.add(part)
    found = sampled.statistics()
    assert (found.count, found.least, found.greatest) == (values.size, values.min(), values.max())
    assert found.mean == pytest.approx(values.mean(), abs=1e-9)
    assert found.percentiles[50] == pytest.approx(np.median(values), abs=0.05)


@pytest.mark.parametrize("values", [[1.0, 2.0], [math.nan], [1e300, -1e300]])
def test_statistics_are_json(values: list[float]) -> None:
    found = told(values)
    assert (
        ColumnStatistics.model_validate_json(canonical_json(found.model_dump(mode="json"))) == found
    )
