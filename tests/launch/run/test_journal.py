"""The journal: no event is lost or written twice, whatever happens to the disk or the writer."""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from trainload.core.errors import StorageError
from trainload.launching.run.journal import (
    JOURNAL,
    Event,
    Follower,
    Journal,
    read_events,
    stream_events,
)


def steps(first: int, count: int) -> list[Event]:
    return [Event("step", {"step": step}, time.time()) for step in range(first, first + count)]


def numbers(events: list[Event]) -> list[int]:
    return [event.data["step"] for event in events]


@contextmanager
def room(size: int) -> Iterator[None]:
    """Limit the size of this process's files within the block.

    A write that begins below the limit is truncated there.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events_that_a_full_disk_has_taken_in_part_are_written_once_when_there_is_room(
    tmp_path: Path,
) -> None:
    journal, pending = Journal(tmp_path), steps(0, 10)
    with room(250), pytest.raises(StorageError, match="cannot be written"):
        journal.append(pending)
    assert 0 < len(pending) < 10
    pending += steps(10, 2)
    journal.append(pending)
    assert not pending
    assert (
        numbers(read_events(tmp_path)) == numbers(list(stream_events(tmp_path))) == list(range(12))
    )


def test_a_follower_sees_each_event_of_a_disk_that_was_full_once(tmp_path: Path) -> None:
    journal, pending, follower = Journal(tmp_path), steps(0, 10), Follower(tmp_path)
    with room(250), pytest.raises(StorageError):
        journal.append(pending)
    seen = numbers(list(follower.new()))
    journal.append(pending)
    assert seen + numbers(list(follower.new())) == list(range(10))


def test_a_line_that_a_killed_writer_has_torn_costs_the_next_one_nothing(tmp_path: Path) -> None:
    Journal(tmp_path).append(steps(0, 2))
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"kind":"step","ti')
    Journal(tmp_path).append(steps(2, 2))
    assert numbers(read_events(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_long_journal_is_not_held_in_memory(tmp_path: Path) -> None:
    Journal(tmp_path).append(steps(0, 20_000))
    tracemalloc.start()
    try:
        assert (
            sum(1 for _ in Follower(tmp_path).new())
            == sum(1 for _ in stream_events(tmp_path))
            == 20_000
        )
        assert tracemalloc.get_traced_memory()[1] < (tmp_path / JOURNAL).stat().st_size / 4
    finally:
        tracemalloc.stop()


def test_a_follower_that_stops_in_the_middle_goes_on_there(tmp_path: Path) -> None:
    Journal(tmp_path).append(steps(0, 10))
    follower = Follower(tmp_path)
    seen = numbers(list(islice(follower.new(), 3)))
    assert seen + numbers(list(follower.new())) == list(range(10))
