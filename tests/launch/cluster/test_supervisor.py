"""Decisions of a run's driver after an attempt, and its messages while it waits.

These tests do not use Ray: no attempt is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from trainload.core.errors import RunInterrupted, StorageError, TrainingError
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.cluster import supervisor as module
from trainload.launching.cluster.mailbox import Beat
from trainload.launching.cluster.supervisor import Supervisor, _Failed
from trainload.launching.run.activity import Doing, Phase
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import JOURNAL, Event, read_events
from trainload.launching.run.monitor import Monitor
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.run.run_state import STATE_FILE, Summary, read_state, write_state

STORAGE = _Failed("storage", "no data", cause=StorageError("no data"))
DEATH = _Failed("death", "rank 0 died")
PATIENCE = 600.0
STEP = Event("step", {"step": 0, "loss": 1.5, "gradient_norm": 0.5, "seconds": 0.1}, 1.0)


class Clock:
    """Fake clock whose `sleep` returns at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.on_sleep()

    @property
    def paused(self) -> float:
        """Seconds slept since the last access, rounded."""
        found, self.slept = sum(self.slept), []
        return round(found)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def supervisor(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    def here(node: str) -> Callable[[type], Any]:
        return lambda actor: SimpleNamespace(remote=actor)

    monkeypatch.setattr(module, "on_node", here)
    monkeypatch.setattr(
        "ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node")
    )
    monkeypatch.setattr("ray.kill", lambda actor: None)
    spec = RunSpec.model_construct(run_dir=str(tmp_path), storage_patience=PATIENCE, max_failures=3)
    return Supervisor(spec, lambda event: None, lambda: None)


def lost(run_dir: Path, *, over: bool = False, error: str = "") -> None:
    """Write the state file of a driver that was last heard of ten seconds ago."""
    summary = Summary()
    if error:
        summary.take(Event("failed", {"message": "so it is", "error": error}, 1.0))
    write_state(run_dir, 1, summary, {}, over=over)
    before = (run_dir / STATE_FILE).stat().st_mtime - 10
    os.utime(run_dir / STATE_FILE, (before, before))


def test_storage_that_fails_leaves_the_other_failures_to_the_run(
    supervisor: Supervisor, clock: Clock
) -> None:
    for _ in range(6):
        supervisor._retry_after(STORAGE)
    for _ in range(3):
        supervisor._retry_after(DEATH)
    with pytest.raises(TrainingError, match="rank 0 died"):
        supervisor._retry_after(DEATH)


def test_every_failure_makes_the_pause_longer(supervisor: Supervisor, clock: Clock) -> None:
    pauses = []
    for failed in (DEATH, STORAGE, DEATH, STORAGE):
        supervisor._retry_after(failed)
        pauses.append(clock.paused)
    assert pauses == [0, 2, 4, 8]


def test_storage_that_fails_for_too_long_ends_the_run(supervisor: Supervisor, clock: Clock) -> None:
    supervisor._retry_after(STORAGE)
    clock.now += PATIENCE + 1
    with pytest.raises(StorageError, match="no data"):
        supervisor._retry_after(STORAGE)


def test_an_attempt_that_has_stepped_since_has_all_the_patience(
    supervisor: Supervisor, clock: Clock
) -> None:
    supervisor._retry_after(STORAGE)
    for _ in range(5):
        clock.now += PATIENCE + 1
        supervisor._journal.take([STEP])
        supervisor._retry_after(STORAGE)
    assert clock.paused == 0


def test_a_run_whose_last_checkpoint_cannot_be_written_is_not_trained_again_and_again(
    supervisor: Supervisor, clock: Clock
) -> None:
    supervisor._beats = [Beat(0, "node", 1, Doing(Phase.ENDING, step=9))]
    supervisor._journal.take([STEP])
    supervisor._retry_after(STORAGE)
    clock.now += PATIENCE + 1
    supervisor._journal.take([STEP])
    with pytest.raises(StorageError, match="no data"):
        supervisor._retry_after(STORAGE)


def test_a_driver_that_waits_says_so_every_second(
    supervisor: Supervisor, clock: Clock, tmp_path: Path
) -> None:
    told: list[float] = []

    def look() -> None:
        if (tmp_path / STATE_FILE).exists():
            (tmp_path / STATE_FILE).unlink()
            told.append(clock.now)

    clock.on_sleep = look
    supervisor._pause(10.0)
    assert 9 <= len(told) <= 11


def test_a_driver_that_waits_for_storage_goes_on_where_it_asks_for_nothing(
    supervisor: Supervisor, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(path: Path) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "exists", exists)
    supervisor._pause(3.0)
    assert clock.paused == 3


@pytest.mark.parametrize(("over", "error"), [(False, ""), (True, "LostClusterError")])
def test_a_stop_that_was_asked_for_while_there_was_no_driver_is_met(
    supervisor: Supervisor, tmp_path: Path, over: bool, error: str
) -> None:
    lost(tmp_path, over=over, error=error)
    (tmp_path / Request.STOP.file).touch()
    with pytest.raises(RunInterrupted, match="the run was asked to stop"):
        supervisor.run()
    state = read_state(tmp_path)
    assert state is not None
    assert state.phase == "stopped"
    assert [event.kind for event in read_events(tmp_path)] == ["stopped"]
    assert not (tmp_path / Request.STOP.file).exists()


@pytest.mark.parametrize(
    "case", ["older than the last word", "of a run that was over", "of a run that had none"]
)
def test_a_stop_of_before_is_forgotten(
    supervisor: Supervisor, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case != "of a run that had none":
        lost(tmp_path, over="over" in case, error="TrainingError" if "over" in case else "")
    (tmp_path / Request.STOP.file).touch()
    if "older" in case:
        os.utime(tmp_path / Request.STOP.file, (1.0, 1.0))
    monkeypatch.setattr(supervisor, "_attempt", lambda: True)
    supervisor.run()
    assert not (tmp_path / Request.STOP.file).exists()


class Calls:
    """Fake mailbox whose first `lost` responses are lost."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.numbers: list[int] = []
        self.collect = SimpleNamespace(remote=self._collect)

    def _collect(self, request: Request, written: int, number: int) -> Any:
        self.numbers.append(number)
        found = SimpleNamespace(
            number=len(self.numbers),
            events=[],
            printed={},
            beats=[],
            order=(),
            met=[],
            failure=None,
        )
        return found if len(self.numbers) > self.lost else None


def test_the_driver_acknowledges_what_it_has_heard_alone(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(answer: Any, timeout: float) -> Any:
        if answer is None:
            raise GetTimeoutError("no answer")
        return answer

    calls = Calls(lost=2)
    monkeypatch.setattr(supervisor, "_mailbox", calls)
    monkeypatch.setattr("ray.get", get)
    for _ in range(4):
        supervisor._listen(Monitor(1, 1.0, 1.0, 1.0))
    assert calls.numbers == [0, 0, 0, 3]


def test_the_last_words_of_an_attempt_are_not_missed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(answer: Any, timeout: float) -> Any:
        if answer is None:
            raise GetTimeoutError("no answer")
        return answer

    calls = Calls(lost=2)
    monkeypatch.setattr(supervisor, "_mailbox", calls)
    monkeypatch.setattr("ray.get", get)
    attempt = SimpleNamespace(
        ended=SimpleNamespace(is_set=lambda: True), error=None, seats=("node",)
    )
    assert supervisor._follow(attempt, Monitor(1, 1.0, 1.0, 1.0), None) is None  # type: ignore[arg-type]  # the attempt has ended
    assert len(calls.numbers) == 3


class Leaving:
    """Fake attempt on a node that is drained in a minute. `another`: a replacement is available."""

    def __init__(self, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.another = False
        monkeypatch.setattr(supervisor, "_find_room", lambda leave: self.another or None)

    def draining_nodes(self) -> dict[str, float | None]:
        return {"node": 60.0}


def preemptions(run_dir: Path) -> list[str]:
    return [
        str(event.data["message"]) for event in read_events(run_dir) if event.kind == "preemption"
    ]


WARNED = "node node will be gone in 60 s: a checkpoint is written; no other node is available yet"
LEFT = "node node will be gone in 60 s: the run moves to other nodes, with a checkpoint"


def test_a_run_whose_node_will_be_gone_saves_at_once_and_says_so_once(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave: Any = Leaving(supervisor, monkeypatch)
    supervisor._journal.take([STEP])
    for _ in range(3):
        supervisor._handle_draining(leave)
    assert preemptions(tmp_path) == [WARNED]
    assert (tmp_path / Request.CHECKPOINT.file).exists()
    assert not supervisor._moving


def test_it_goes_to_another_node_as_soon_as_there_is_one(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave: Any = Leaving(supervisor, monkeypatch)
    supervisor._journal.take([STEP])
    supervisor._handle_draining(leave)
    leave.another = True
    for _ in range(3):
        supervisor._handle_draining(leave)
    assert preemptions(tmp_path) == [WARNED, LEFT]
    assert supervisor._moving


def test_a_run_that_has_not_stepped_yet_does_not_go(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave: Any = Leaving(supervisor, monkeypatch)
    leave.another = True
    supervisor._handle_draining(leave)
    assert not supervisor._moving


def test_a_driver_that_was_replaced_leaves_journal_and_state_to_the_other(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    def check_driver() -> None:
        raise LeaseLostError("the lease is lost")

    supervisor._check_driver = check_driver
    with pytest.raises(LeaseLostError):
        supervisor.run()
    assert not (tmp_path / JOURNAL).exists()
    assert read_state(tmp_path) is None
