"""The order of the data: a pure function with the properties of a good shuffle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trainload.core.errors import DataError
from trainload.launching.data.sampler import rows, sequential


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 31, 100, 1000, 1023, 1025, 65537])
def test_every_row_occurs_once_in_each_epoch(size: int) -> None:
    for epoch in (0, 1, 5):
        assert np.array_equal(np.sort(rows(3, size, epoch * size, size)), np.arange(size))


def test_a_stretch_over_the_end_of_an_epoch_is_its_pieces() -> None:
    whole = rows(11, 37, 20, 200)
    pieces = [rows(11, 37, 20 + at, 1) for at in range(200)]
    assert np.array_equal(whole, np.concatenate(pieces))


def test_epochs_differ() -> None:
    epochs = rows(0, 1000, 0, 20_000).reshape(20, 1000)
    agreeing = [int((a == b).sum()) for a, b in itertools.combinations(epochs, 2)]
    assert max(agreeing) < 10  # two independent orders agree at 1 position on average


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2**63), (5, -5), (7, 7 + 2**32)])
def test_seeds_differ(first: int, second: int) -> None:
    assert (rows(first, 1000, 0, 1000) == rows(second, 1000, 0, 1000)).sum() < 10


@pytest.mark.parametrize("size", [2, 3, 5, 13, 50])
def test_each_row_comes_equally_often_to_each_position(size: int) -> None:
    epochs = 400 * size
    order = rows(42, size, 0, epochs * size).reshape(epochs, size)
    counts = np.stack([np.bincount(order[:, at], minlength=size) for at in range(size)])
    expected = epochs / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_all_orders_of_five_rows_come_equally_often() -> None:
    epochs = 24_000
    order = rows(1, 5, 0, epochs * 5).reshape(epochs, 5)
    codes = order @ np.array([625, 125, 25, 5, 1])
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == 120
    expected = epochs / 120
    assert float(((counts - expected) ** 2 / expected).sum()) < 119 + 5 * np.sqrt(2 * 119)


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    order = rows(9, 10_000, 0, 10_000)
    assert abs(float(np.corrcoef(order[:-1], order[1:])[0, 1])) < 0.05
    assert abs(float(np.corrcoef(np.arange(10_000), order)[0, 1])) < 0.05


def test_the_order_is_the_same_for_ever() -> None:
    assert rows(1234, 1000, 997, 6).tolist() == [592, 55, 603, 174, 471, 66]


def test_the_order_of_so_many_rows_that_they_could_not_be_gone_through() -> None:
    found = rows(0, 10**15, 10**16 + 3, 32)
    assert 0 <= found.min() <= found.max() < 10**15
    assert len(set(found.tolist())) == 32


def test_sequential_is_the_data_sets_own_order() -> None:
    assert sequential(5, 3, 6).tolist() == [3, 4, 0, 1, 2, 3]


@pytest.mark.parametrize(("size", "start", "count"), [(0, 0, 1), (5, -1, 1), (5, 0, -1)])
def test_impossible_positions_are_refused(size: int, start: int, count: int) -> None:
    with pytest.raises(DataError, match="size >= 1"):
        rows(0, size, start, count)
