"""Messages of ranks reach the driver exactly once, even if responses are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from trainload.core.errors import DataError, StorageError
from trainload.launching.cluster import relay as module
from trainload.launching.cluster.mailbox import Beat, Collected, Mailbox, NodeReport
from trainload.launching.cluster.relay import Relay
from trainload.launching.ranks.rank_messages import Flushed, Met, Printed
from trainload.launching.run.activity import Doing, Phase
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event

NONE = Request.NONE


def steps(*numbers: int) -> list[Event]:
    return [Event("step", {"step": number}, float(number)) for number in numbers]


def report(
    *numbers: int,
    printed: str = "",
    met: list[Request] | None = None,
    failure: Any = None,
    beats: list[Beat] | None = None,
) -> NodeReport:
    return NodeReport(
        steps(*numbers), beats or [], {0: printed} if printed else {}, met or [], failure
    )


@pytest.fixture
def box() -> Mailbox:
    mailbox = Mailbox()
    mailbox.begin(1)
    return mailbox


def test_acknowledged_messages_are_not_returned_again(box: Mailbox) -> None:
    box.report(1, "node", 1, report(0, 1, printed="one\n", met=[Request.CHECKPOINT]))
    first = box.collect(NONE, 0, 0)
    second = box.collect(NONE, 2, first.number)
    assert (first.events, first.printed, first.met) == (
        steps(0, 1),
        {0: "one\n"},
        [Request.CHECKPOINT],
    )
    assert (second.events, second.printed, second.met) == ([], {}, [])


def test_unacknowledged_messages_are_returned_again_with_new_ones(box: Mailbox) -> None:
    box.report(1, "node", 1, report(0, 1, printed="one\n", met=[Request.CHECKPOINT]))
    lost = box.collect(NONE, 0, 0)
    box.report(1, "node", 2, report(2, printed="two\n"))
    found = box.collect(NONE, 0, 0)
    assert found.number > lost.number
    assert (found.events, found.printed, found.met) == (
        steps(0, 1, 2),
        {0: "one\ntwo\n"},
        [Request.CHECKPOINT],
    )


def test_a_lost_response_is_not_acknowledged_by_an_earlier_one(box: Mailbox) -> None:
    box.report(1, "node", 1, report(0))
    first = box.collect(NONE, 0, 0)
    box.report(1, "node", 2, report(1))
    box.collect(NONE, 1, first.number)
    assert box.collect(NONE, 1, first.number).events == steps(1)


def test_collected_events_survive_the_beginning_of_another_attempt(box: Mailbox) -> None:
    box.report(1, "node", 1, report(0))
    box.collect(NONE, 0, 0)
    box.begin(2)
    assert box.collect(NONE, 0, 0).events == steps(0)


def test_a_response_does_not_change_later(box: Mailbox) -> None:
    box.report(1, "node", 1, report(0))
    first: Collected = box.collect(NONE, 0, 0)
    box.report(1, "node", 2, report(1))
    box.collect(NONE, 0, 0)
    assert first.events == steps(0)


def test_a_repeated_report_counts_once(box: Mailbox) -> None:
    box.report(1, "node", 1, report(0, 1, printed="one\n"))
    assert box.report(1, "node", 1, report(0, 1, printed="one\n")) == (NONE, 2, 0)
    assert box.collect(NONE, 0, 0).printed == {0: "one\n"}


def test_reports_of_two_nodes_have_numbers_of_their_own(box: Mailbox) -> None:
    box.report(1, "a", 1, report(0))
    assert box.report(1, "b", 1, report(1)) == (NONE, 2, 0)


def test_reports_of_an_earlier_attempt_are_dropped(box: Mailbox) -> None:
    box.begin(2)
    box.report(1, "node", 1, report(0, failure=DataError("late")))
    collected = box.collect(NONE, 0, 0)
    assert (collected.events, collected.failure) == ([], None)


def test_the_first_failure_of_an_attempt_counts(box: Mailbox) -> None:
    first = DataError("first")
    box.report(1, "a", 1, report(failure=first))
    box.report(1, "b", 1, report(failure=StorageError("second")))
    assert box.collect(NONE, 0, 0).failure is first


def test_a_fulfilled_request_is_no_longer_pending(box: Mailbox) -> None:
    box.collect(Request.CHECKPOINT, 0, 0)
    assert box.report(1, "node", 1, report())[0] is Request.CHECKPOINT
    assert box.report(1, "node", 2, report(met=[Request.CHECKPOINT]))[0] is NONE


def test_the_age_of_a_heartbeat_includes_its_time_on_the_node(box: Mailbox) -> None:
    beat = Beat(0, "node", 1, "GPU 3", Doing(Phase.STEP, step=3), age=5.0)
    box.report(1, "node", 1, report(beats=[beat]))
    assert box.collect(NONE, 0, 0).beats[0].age >= 5.0


class Call:
    """A method of the actor, called in this process. Its response is lost if `lost` says so."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = lambda *arguments: lambda: method(*arguments)


class Actor:
    def __init__(self, box: Mailbox) -> None:
        self.report = Call(box.report)


class Rank:
    """A rank without a process, which stores the messages that it receives."""

    def __init__(self) -> None:
        self.number, self.pid, self.device = 0, 7, "CPU"
        self.received: list[object] = []

    def send(self, message: object) -> None:
        self.received.append(message)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Flags for the next responses: True if the response is lost. Later responses arrive."""
    flags: list[bool] = []

    def get(call: Callable[[], Any], timeout: float) -> Any:
        answer = call()
        if flags and flags.pop(0):
            raise GetTimeoutError("no answer")
        return answer

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.5)
    return flags


@pytest.fixture
def relay(box: Mailbox, lost: list[bool], monkeypatch: pytest.MonkeyPatch) -> Relay:
    """A relay whose thread does not run: reports are sent by `flush` and by tests."""
    monkeypatch.setattr(Relay, "_run", lambda self: None)
    return Relay(Actor(box), 1, "node")  # type: ignore[arg-type]  # not a Ray actor


def test_a_flush_waits_for_the_journal_even_if_responses_get_lost(
    box: Mailbox, relay: Relay, lost: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.receive(Rank(), *steps(0))
    lost += [True, True]
    written: list[int] = []

    def sleep(seconds: float) -> None:
        if not lost and not written:
            collected = box.collect(NONE, 0, 0)
            written.append(len(collected.events))
            box.collect(NONE, len(collected.events), collected.number)

    monkeypatch.setattr("time.sleep", sleep)
    relay.flush()
    assert written == [1]


def test_the_answer_to_a_flush_has_its_number(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank()
    monkeypatch.setattr(relay, "flush", lambda: None)
    relay._flush_for(rank, 3)
    assert rank.received == [Flushed(3)]


def test_a_flush_gives_up_if_nobody_responds(relay: Relay, lost: list[bool]) -> None:
    relay.receive(Rank(), *steps(0))
    began = time.monotonic()
    lost += [True] * 1000
    relay.flush()
    assert time.monotonic() - began >= 0.5


def test_a_report_is_repeated_until_it_is_acknowledged(
    box: Mailbox, relay: Relay, lost: list[bool]
) -> None:
    rank = Rank()
    relay.receive(rank, *steps(0))
    relay.receive(rank, Printed("one\n"))
    relay.receive(rank, Met(Request.CHECKPOINT))
    lost += [True]
    assert relay.send(1.0) is None
    relay.receive(rank, *steps(1))
    relay.receive(rank, Printed("two\n"))
    assert relay.send(1.0) is None  # the first report again
    assert relay.send(1.0) == (NONE, 2, 0)
    collected = box.collect(NONE, 0, 0)
    assert (collected.events, collected.printed, collected.met) == (
        steps(0, 1),
        {0: "one\ntwo\n"},
        [Request.CHECKPOINT],
    )


def test_a_rank_that_is_forked_late_receives_the_pending_request(relay: Relay) -> None:
    relay._pass_on(Request.STOP)
    rank = Rank()
    relay.add(rank)
    assert rank.received == [Request.STOP]


def test_a_kept_rank_forgets_the_request_of_its_last_attempt(relay: Relay) -> None:
    rank = Rank()
    relay.add(rank)
    assert rank.received == [NONE]


def test_a_request_is_passed_on_once(relay: Relay) -> None:
    rank = Rank()
    relay.add(rank)
    for request in (NONE, Request.STOP, Request.STOP):
        relay._pass_on(request)
    assert rank.received == [NONE, Request.STOP]
