"""Messages of workers reach the driver exactly once, even if responses are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from trainload.launching.cluster import mailbox as module
from trainload.launching.cluster.mailbox import Collected, Mailbox, RayContact
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event

NONE = Request.NONE


def steps(*numbers: int) -> list[Event]:
    return [Event("step", {"step": number}, float(number)) for number in numbers]


@pytest.fixture
def box() -> Mailbox:
    found = Mailbox()
    found.begin(1)
    return found


def test_what_is_acknowledged_is_not_handed_out_again(box: Mailbox) -> None:
    box.tell(1, "rank 0", 0, steps(0, 1), None)
    box.hear(1, 0, "one\n")
    box.meet(1, Request.CHECKPOINT)
    first = box.collect(NONE, 0, 0)
    second = box.collect(NONE, 2, first.number)
    assert (first.events, first.printed, first.met) == (
        steps(0, 1),
        {0: "one\n"},
        [Request.CHECKPOINT],
    )
    assert (second.events, second.printed, second.met) == ([], {}, [])


def test_what_the_driver_has_not_heard_of_is_handed_out_again_with_what_came_since(
    box: Mailbox,
) -> None:
    box.tell(1, "rank 0", 0, steps(0, 1), None)
    box.hear(1, 0, "one\n")
    box.meet(1, Request.CHECKPOINT)
    lost = box.collect(NONE, 0, 0)
    box.tell(1, "rank 0", 2, steps(2), None)
    box.hear(1, 0, "two\n")
    found = box.collect(NONE, 0, 0)
    assert found.number > lost.number
    assert (found.events, found.printed, found.met) == (
        steps(0, 1, 2),
        {0: "one\ntwo\n"},
        [Request.CHECKPOINT],
    )


def test_an_answer_that_was_lost_is_not_acknowledged_by_an_earlier_one(box: Mailbox) -> None:
    box.tell(1, "rank 0", 0, steps(0), None)
    first = box.collect(NONE, 0, 0)
    box.tell(1, "rank 0", 1, steps(1), None)
    box.collect(NONE, 1, first.number)
    assert box.collect(NONE, 1, first.number).events == steps(1)


def test_events_that_were_handed_out_survive_the_beginning_of_another_attempt(box: Mailbox) -> None:
    box.tell(1, "rank 0", 0, steps(0), None)
    box.collect(NONE, 0, 0)
    box.begin(2)
    assert box.collect(NONE, 0, 0).events == steps(0)


def test_what_was_handed_out_stays_as_it_was(box: Mailbox) -> None:
    box.tell(1, "rank 0", 0, steps(0), None)
    first: Collected = box.collect(NONE, 0, 0)
    box.tell(1, "rank 0", 1, steps(1), None)
    box.collect(NONE, 0, 0)
    assert first.events == steps(0)


def test_events_are_counted_once_however_often_they_are_handed_out(box: Mailbox) -> None:
    box.tell(1, "rank 0", 0, steps(0, 1), None)
    box.collect(NONE, 0, 0)
    box.collect(NONE, 0, 0)
    assert box.tell(1, "rank 0", 0, steps(0, 1, 2), None) == (NONE, 3, 0)


class Call:
    """A method of the actor, called in this process. Its response is lost if `lost` says so."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = lambda *arguments: lambda: method(*arguments)


class Actor:
    def __init__(self, box: Mailbox) -> None:
        self.tell = Call(box.tell)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Flags for the next responses: true if the response is lost. Later responses arrive."""
    found: list[bool] = []

    def get(call: Callable[[], Any], timeout: float) -> Any:
        answer = call()
        if found and found.pop(0):
            raise GetTimeoutError("no answer")
        return answer

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr(module, "_SEND_SECONDS", 0.01)
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.5)
    return found


def contact(box: Mailbox) -> RayContact:
    return RayContact(Actor(box), 1, 0, "rank 0", 1, "node")  # type: ignore[arg-type]  # not a Ray actor


def test_a_flush_waits_for_the_journal_though_answers_get_lost(
    box: Mailbox, lost: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = contact(box)
    worker.write("step", step=0)
    lost += [True, True]
    written: list[int] = []

    def sleep(seconds: float) -> None:
        if not lost and not written:
            found = box.collect(NONE, 0, 0)
            written.append(len(found.events))
            box.collect(NONE, len(found.events), found.number)

    monkeypatch.setattr("time.sleep", sleep)
    worker.flush()
    assert written == [1]


def test_a_flush_gives_up_where_nobody_answers(box: Mailbox, lost: list[bool]) -> None:
    worker = contact(box)
    worker.write("step", step=0)
    began = time.monotonic()
    lost += [True] * 1000
    worker.flush()
    assert time.monotonic() - began >= 0.5


def test_a_lost_answer_asks_for_nothing_new(box: Mailbox, lost: list[bool]) -> None:
    worker = contact(box)
    lost += [True]
    assert worker._send(1.0, beats=False) is None
    assert worker._send(1.0, beats=False) == (NONE, 0, 0)
