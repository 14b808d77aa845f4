"""Journals as columns of numbers, and long columns reduced to few points."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as given_by
from tests.report.made import made_run, start, step, steps

from trainload.launching.run.journal import JOURNAL, losses, read_events, stream_events
from trainload.report.runs.history import read_history
from trainload.report.runs.thinning import thin

NUMBERS = given_by.lists(
    given_by.floats(-1e6, 1e6) | given_by.just(math.nan) | given_by.just(math.inf),
    min_size=1,
    max_size=400,
)


def test_steps_that_were_done_again_are_as_they_were_last() -> None:
    events = [
        start(0),
        *steps(0, range(6), loss=3.0),
        start(10, step=4),
        *steps(10, range(4, 8), loss=2.0),
    ]
    found = read_history(events).steps
    assert found.number[found.kept()].tolist() == list(range(8))
    assert found.columns["loss"][found.kept()].tolist() == losses(events) == [3.0] * 4 + [2.0] * 4
    assert [found.number[each].tolist() for each in found.discarded()] == [[4, 5]]


def test_stretches_that_were_done_again_twice_are_apart() -> None:
    events = [
        start(0),
        *steps(0, range(3)),
        start(10),
        *steps(10, range(3)),
        start(20),
        *steps(20, range(3)),
    ]
    found = read_history(events).steps
    assert [found.attempt[each].tolist() for each in found.discarded()] == [[0, 0, 0], [1, 1, 1]]


def test_a_number_that_is_not_there_is_no_infinite_one() -> None:
    found = read_history(
        [
            start(0),
            step(1, 0, gradient_norm=math.nan),
            step(2, 1, mfu=0.5, metrics={"accuracy": 0.25}),
        ]
    ).steps
    assert found.columns["gradient_norm"].tolist() == [math.inf, 2.0]
    assert np.isnan(found.columns["mfu"]).tolist() == [True, False]
    assert (math.isnan(found.metrics["accuracy"][0]), found.metrics["accuracy"][1]) == (True, 0.25)


def test_a_journal_is_streamed_as_it_is_read(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [start(0), *steps(0, range(3))])
    with (run / JOURNAL).open("a") as file:
        file.write('{"kind":"step","ti')
    assert list(stream_events(run)) == read_events(run)
    assert len(read_events(run)) == 4


def test_few_numbers_stay_as_they_are() -> None:
    line = thin(np.arange(5.0), np.array([1.0, math.nan, 3.0, math.inf, 5.0]))
    assert line is not None
    assert not line.thinned
    assert line.x.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert line.mean[[0, 1, 3]].tolist() == [1.0, 3.0, 5.0]
    assert math.isnan(line.mean[2])
    assert line.broken.tolist() == [3.0]


def test_of_nothing_there_is_no_line() -> None:
    assert thin(np.arange(3.0), np.full(3, math.nan)) is None


@given(NUMBERS, given_by.integers(1, 50))
def test_no_spike_is_lost(numbers: list[float], buckets: int) -> None:
    y = np.array(numbers)
    line = thin(np.arange(float(len(y))), y, buckets)
    finite = y[np.isfinite(y)]
    if line is None:
        assert np.isnan(y).all()
        return
    assert len(line.x) <= 2 * buckets
    assert len(line.broken) <= max(buckets, 2 * buckets)
    assert bool(len(line.broken)) == bool(np.isinf(y).any())
    if len(finite):
        assert np.nanmin(line.low) == finite.min()
        assert np.nanmax(line.high) == finite.max()
        assert (
            np.isnan(line.mean) | ((line.mean >= line.low - 1e-6) & (line.mean <= line.high + 1e-6))
        ).all()


def test_points_stand_in_the_middle_of_their_steps() -> None:
    line = thin(np.arange(100.0), np.arange(100.0), 10)
    assert line is not None
    assert line.x == pytest.approx(np.arange(4.5, 100.0, 10.0))
    assert line.mean == pytest.approx(line.x)
