"""The driver's journal, which buffers events while storage fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainload.core.errors import StorageError
from trainload.launching.cluster.buffered_journal import BufferedJournal
from trainload.launching.run.journal import LOGS, Event, Journal, log_name, read_events

STEP = Event("step", {"step": 0, "loss": 1.5, "gradient_norm": 0.5, "seconds": 0.1}, 1.0)
CHECKPOINT = Event("checkpoint", {"step": 1}, 2.0)


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def book(tmp_path: Path, told: list[Event]) -> BufferedJournal:
    return BufferedJournal(tmp_path, told.append)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(journal: Journal, events: object) -> None:
        raise StorageError("the journal cannot be written: No space left on device")

    monkeypatch.setattr(Journal, "append", full)


def test_what_is_taken_is_written_and_told(
    book: BufferedJournal, told: list[Event], tmp_path: Path
) -> None:
    book.take([STEP, CHECKPOINT])
    assert read_events(tmp_path) == told == [STEP, CHECKPOINT]
    assert (book.written, book.stepped, book.has_checkpoint, book.ended) == (2, True, True, False)


def test_what_storage_does_not_take_is_written_later_in_order(
    book: BufferedJournal, told: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.take([STEP])
    with monkeypatch.context() as patch:
        refuse(patch)
        book.take([CHECKPOINT])
        book.take([STEP])
        assert book.written == 1
    book.take([])
    assert read_events(tmp_path) == [STEP, CHECKPOINT, STEP]
    assert book.written == 3
    assert [event.kind for event in told] == ["step", "warning", "checkpoint", "step"]


def test_the_drivers_own_words_are_none_of_the_workers(
    book: BufferedJournal, tmp_path: Path
) -> None:
    book.write("waiting", message="for a node")
    book.take([STEP])
    assert book.written == 1
    assert [event.kind for event in read_events(tmp_path)] == ["waiting", "step"]


def test_a_new_checkpoint_is_told_of_once(book: BufferedJournal) -> None:
    assert not book.new_checkpoint()
    book.take([CHECKPOINT])
    assert book.new_checkpoint()
    assert not book.new_checkpoint()


def test_a_later_driver_knows_what_came_before(book: BufferedJournal, tmp_path: Path) -> None:
    book.take([STEP, CHECKPOINT])
    later = BufferedJournal(tmp_path, lambda event: None)
    assert later.has_checkpoint
    assert not later.stepped
    assert (later.summary.step, later.summary.checkpoint) == (1, 1)


def test_what_ranks_print_is_kept_by_rank(book: BufferedJournal, tmp_path: Path) -> None:
    book.keep({0: "one\n", 3: "two\n"})
    book.keep({3: "three\n"})
    assert (tmp_path / LOGS / log_name(0)).read_text() == "one\n"
    assert (tmp_path / LOGS / log_name(3)).read_text() == "two\nthree\n"


def test_events_are_acknowledged_once_others_can_read_them(tmp_path: Path) -> None:
    published = [0.0]
    journal = BufferedJournal(tmp_path, lambda event: None, published=lambda: published[0])
    for number in range(3):
        journal.take([Event("warning", {"message": str(number)}, 1.0)])
        published.append((tmp_path / "events.jsonl").stat().st_size)
    assert journal.written == 0
    published[0] = published[2]
    journal.take([])
    assert journal.written == 2
    published[0] = published[3]
    journal.take([Event("warning", {"message": "3"}, 1.0)])
    assert journal.written == 3
