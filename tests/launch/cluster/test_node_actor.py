"""Processes that a node's actor keeps for the next attempt, without Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fork_servers import end_servers

from trainload.launching.cluster import node_actor as module
from trainload.launching.cluster.node_actor import AttemptArgs, NodeActor
from trainload.launching.ranks.fork_server import ServerOptions
from trainload.launching.ranks.rank_messages import Prepare

ARGS = AttemptArgs("{}", None, 1, ("here", "there", "here"))


class NoRelay:
    """A relay that forwards nothing."""

    def __init__(self, *_: Any) -> None:
        self.ranks: list[Any] = []

    def add(self, rank: Any) -> None:
        self.ranks.append(rank)

    def receive(self, rank: Any, message: object) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def actor(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeActor]:
    monkeypatch.setattr(module, "Relay", NoRelay)
    actor = NodeActor("here", ServerOptions(1000.0))
    yield actor
    actor.end()
    actor._server.close()


def pids(actor: NodeActor) -> list[int]:
    return [rank.pid for rank in actor._ranks]


def test_it_starts_the_ranks_of_its_node(actor: NodeActor) -> None:
    failures = actor.prepare(ARGS, quiet=True)
    assert [rank.number for rank in actor._ranks] == [0, 2]
    assert list(failures) == [0]  # "{}" is no run
    assert not failures[0].died


def test_the_process_that_prepares_the_node_is_no_rank_and_ends(
    actor: NodeActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparing: list[Any] = []
    waiting = module._wait_for

    def wait_for(ranks: Any) -> Any:
        preparing.extend(ranks)
        return waiting(ranks)

    monkeypatch.setattr(module, "_wait_for", wait_for)
    actor.prepare(ARGS, quiet=True)
    (preparer,) = preparing
    assert preparer.pid not in pids(actor)
    assert preparer.child.exit_status(0) is not None
    assert not any(rank.has_ended for rank in actor._ranks)


@pytest.mark.parametrize(
    "end",
    [lambda actor: actor.kill([0]), lambda actor: actor.release(keep=True), NodeActor.end],
    ids=["killed", "released", "ended"],
)
def test_preparing_can_be_ended(
    actor: NodeActor, monkeypatch: pytest.MonkeyPatch, end: Callable[[NodeActor], None]
) -> None:
    waiting = module._wait_for
    preparing: list[Any] = []

    def wait_for(ranks: Any) -> Any:
        preparing.extend(ranks)
        end(actor)
        return waiting(ranks)

    def send(rank: Any, message: object) -> None:
        """Stop a process that is to prepare the node, which would fail otherwise."""
        if isinstance(message, Prepare):
            os.kill(rank.pid, signal.SIGSTOP)
        sending(rank, message)

    sending = module._Rank.send
    monkeypatch.setattr(module._Rank, "send", send)
    monkeypatch.setattr(module, "_wait_for", wait_for)
    (failure,) = actor.prepare(ARGS, quiet=True).values()
    assert failure.died
    assert failure.text.startswith("preparing the node: killed by signal 9")
    (preparer,) = preparing
    assert preparer.child.exit_status(0) == -signal.SIGKILL


def test_an_attempt_that_has_been_ended_prepares_nothing(
    actor: NodeActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparing = module._comparable

    def end_and_compare(spec: str) -> str:
        actor.release(keep=True)
        return comparing(spec)

    monkeypatch.setattr(module, "_comparable", end_and_compare)
    assert actor.prepare(ARGS, quiet=True) == {}


def kill_and_release(actor: NodeActor) -> None:
    actor.kill([2])
    actor.release(keep=True)


def fail_and_release(actor: NodeActor) -> None:
    failures = actor.train(ARGS, None)  # "{}" is no run
    assert sorted(failures) == [0, 2]
    actor.release(keep=False)


KEPT: dict[str, tuple[Callable[[NodeActor], None], list[bool]]] = {
    "a rank elsewhere has died": (lambda actor: actor.release(keep=True), [True, True]),
    "preparing has failed": (lambda actor: actor.release(keep=False), [True, True]),
    "no rank has died": (fail_and_release, [False, False]),
    "rank 2 has died": (kill_and_release, [True, False]),
    "the attempt was ended by force": (lambda actor: actor.end(), [False, False]),
}


@pytest.mark.parametrize("case", KEPT)
def test_ranks_that_are_not_at_fault_stay(actor: NodeActor, case: str) -> None:
    actor.prepare(ARGS, quiet=True)
    before = pids(actor)
    leave, stay = KEPT[case]
    leave(actor)
    actor.prepare(ARGS, quiet=True)
    assert [old == new for old, new in zip(before, pids(actor), strict=True)] == stay


def test_a_fork_server_that_was_killed_is_replaced(actor: NodeActor, runtime: Path) -> None:
    actor.prepare(ARGS, quiet=True)
    end_servers(runtime)
    for rank in actor._ranks:
        rank.child.exit_status()
    assert list(actor.prepare(ARGS, quiet=True)) == [0]
