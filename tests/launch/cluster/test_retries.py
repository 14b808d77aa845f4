"""Retries of a run: the failures that allow them, and the pauses before them."""

from __future__ import annotations

import pytest
from tests.launch.cluster.simulated_cluster import Clock

from trainload.launching.cluster.retries import LONGEST_PAUSE, Failure, Retries

STORAGE = Failure("storage", "no data")
DEATH = Failure("death", "rank 0 died")
PATIENCE = 600.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retries(clock: Clock) -> Retries:
    return Retries(3, PATIENCE, clock)


def pause(retries: Retries, failure: Failure, **since: bool) -> float | None:
    return retries.pause_after(failure, **{"saved": False, "stepped": False, **since})


def test_failures_of_storage_do_not_count_as_others(retries: Retries) -> None:
    for failure in [STORAGE] * 6 + [DEATH] * 3:
        assert pause(retries, failure) is not None
    assert pause(retries, DEATH) is None


def test_every_failure_makes_the_pause_longer(retries: Retries) -> None:
    assert [pause(retries, each) for each in (DEATH, STORAGE, DEATH, STORAGE)] == [0, 2, 4, 8]


def test_a_pause_is_limited(retries: Retries) -> None:
    for _ in range(20):
        last = pause(retries, STORAGE)
    assert last == LONGEST_PAUSE


def test_storage_that_fails_for_too_long_ends_the_run(retries: Retries, clock: Clock) -> None:
    pause(retries, STORAGE)
    clock.now += PATIENCE + 1
    assert pause(retries, STORAGE) is None


@pytest.mark.parametrize("since", ["saved", "stepped"])
def test_progress_renews_the_patience_with_storage(
    retries: Retries, clock: Clock, since: str
) -> None:
    pause(retries, STORAGE)
    for _ in range(5):
        clock.now += PATIENCE + 1
        assert pause(retries, STORAGE, **{since: True}) == 0


def test_a_checkpoint_alone_renews_the_count_of_other_failures(retries: Retries) -> None:
    for _ in range(3):
        pause(retries, DEATH, stepped=True)
    assert pause(retries, DEATH, saved=True) == 0
    for _ in range(2):
        pause(retries, DEATH)
    assert pause(retries, DEATH, stepped=True) is None
