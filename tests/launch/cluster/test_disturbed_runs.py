"""Runs with random failures at random moments end completely, or with an error that has a cause.

Hypothesis draws an action before each advance of the driver, on a simulated cluster.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.launch.cluster.simulated_cluster import (
    HANG_SECONDS,
    MAX_FAILURES,
    PATIENCE,
    STEPS,
    Driver,
    SimulatedAttempt,
)

from trainload.core.errors import (
    ClusterError,
    DataError,
    LostClusterError,
    RunInterrupted,
    StorageError,
    TrainingError,
)
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.cluster.reservation import DevicesTakenError
from trainload.launching.cluster.states import State
from trainload.launching.cluster.supervisor import Supervisor
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import JOURNAL
from trainload.launching.run.run_state import STATE_FILE

NODES = ("a", "b", "c")
DISTURBED = 60
"""Number of advances before which something may happen."""
UNDISTURBED = 2000
"""Number of further advances within which the run must end."""


class Disturbance:
    """A run that is disturbed.

    Attributes:
        driver: its driver.
        happened: names of what has happened.
        frozen: contents of journal and state when another driver took over.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._advances = 0
        self._presses = False
        self.happened: list[str] = []
        self.frozen: tuple[bytes, bytes, int] | None = None
        self.driver = Driver(run_dir, *NODES[:2], worlds=(1, 2), check_driver=self._check_driver)
        disturbance = self

        class Disturbed(Supervisor):
            def next(self, state: State) -> State:
                disturbance.before(state)
                return super().next(state)

        self.driver.supervisor = Disturbed(self.driver.run, self.driver.cluster, self._sleep)

    def run(self, draw: Callable[[st.SearchStrategy[str]], str]) -> BaseException | None:
        """Run to the end; return the error that has ended the run."""
        self._draw = draw
        try:
            self.driver.supervisor.run()
        except (AssertionError, TypeError, AttributeError):
            raise
        except BaseException as error:  # noqa: BLE001  # the test judges it
            return error
        return None

    def before(self, state: State) -> None:
        """Let something happen before the driver advances."""
        self._advances += 1
        if self._advances <= DISTURBED:
            name = self._draw(st.sampled_from(sorted(HAPPENINGS)))
            self.happened.append(name)
            HAPPENINGS[name](self)
            return
        assert self._advances <= DISTURBED + UNDISTURBED, f"the run does not end: {state}"
        cluster = self.driver.cluster
        cluster.alive, cluster.listed = set(NODES), set(NODES)
        cluster.leaving, cluster.taken = set(), set()
        cluster.answers = "the cluster vanishes" not in self.happened
        self.at_work(SimulatedAttempt.take_step)

    def at_work(self, act: Callable[[SimulatedAttempt], None]) -> None:
        """Let the ranks do something, if there are any."""
        attempts = self.driver.cluster.attempts
        if attempts and attempts[-1].at_work:
            act(attempts[-1])

    def contents(self) -> tuple[bytes, bytes, int]:
        """Return journal, state, and the number of attempts."""
        files = [self._run_dir / name for name in (JOURNAL, STATE_FILE)]
        journal, state = (path.read_bytes() if path.exists() else b"" for path in files)
        return journal, state, len(self.driver.cluster.attempts)

    def pass_time(self, seconds: float) -> None:
        self.driver.clock.now += seconds

    def request_stop(self) -> None:
        (self._run_dir / Request.STOP.file).touch()

    def replace(self) -> None:
        """Let another process take the lease."""
        self.frozen = self.frozen or self.contents()

    def press(self) -> None:
        """Press Ctrl-C, which reaches the driver when it waits next."""
        self._presses = True

    def _sleep(self, seconds: float) -> None:
        self.driver.clock.now += seconds
        if self._presses:
            self._presses = False
            raise KeyboardInterrupt

    def _check_driver(self) -> None:
        if self.frozen is not None:
            raise LeaseLostError("the lease is lost")


def lose(disturbance: Disturbance, node: str) -> None:
    """Lose a node. Ray still lists it."""
    disturbance.driver.cluster.alive.discard(node)

    def end(attempt: SimulatedAttempt) -> None:
        if node in attempt.seats:
            attempt.lose(node)

    disturbance.at_work(end)


def bring(disturbance: Disturbance, node: str) -> None:
    disturbance.driver.cluster.alive.add(node)
    disturbance.driver.cluster.listed.add(node)


def steps(count: int) -> Callable[[Disturbance], None]:
    def act(disturbance: Disturbance) -> None:
        for _ in range(count):
            disturbance.at_work(SimulatedAttempt.take_step)

    return act


HAPPENINGS: dict[str, Callable[[Disturbance], None]] = {
    "nothing": lambda it: None,
    "a second": lambda it: it.pass_time(1.0),
    "a minute": lambda it: it.pass_time(2 * HANG_SECONDS),
    "a long time": lambda it: it.pass_time(PATIENCE + 1),
    "a heartbeat": lambda it: it.at_work(SimulatedAttempt.report),
    "a step": steps(1),
    "two steps": steps(2),
    "five steps": steps(5),
    "a checkpoint": lambda it: it.at_work(SimulatedAttempt.save),
    "rank 0 dies": lambda it: it.at_work(lambda attempt: attempt.die(0)),
    "all ranks die": lambda it: it.at_work(lambda attempt: attempt.die(*range(len(attempt.seats)))),
    "node a is lost": lambda it: lose(it, "a"),
    "node b is lost": lambda it: lose(it, "b"),
    "node a is back": lambda it: bring(it, "a"),
    "node b is back": lambda it: bring(it, "b"),
    "node c comes": lambda it: bring(it, "c"),
    "Ray notices": lambda it: it.driver.cluster.listed.intersection_update(it.driver.cluster.alive),
    "node b leaves": lambda it: it.driver.cluster.leaving.add("b"),
    "node c is taken": lambda it: it.driver.cluster.taken.add("c"),
    "node c is free": lambda it: it.driver.cluster.taken.discard("c"),
    "devices are taken": lambda it: it.at_work(
        lambda attempt: attempt.fail(DevicesTakenError("a"))
    ),
    "storage fails": lambda it: it.at_work(
        lambda attempt: attempt.raise_error(StorageError("no data"))
    ),
    "a row is bad": lambda it: it.at_work(lambda attempt: attempt.raise_error(DataError("bad"))),
    "a stop is requested": Disturbance.request_stop,
    "Ctrl-C": Disturbance.press,
    "the mailbox is silent": lambda it: setattr(it.driver.cluster, "answers", False),
    "the mailbox answers": lambda it: setattr(
        it.driver.cluster, "answers", "the cluster vanishes" not in it.happened
    ),
    "the cluster vanishes": lambda it: it.driver.cluster.vanish(),
    "another driver takes over": Disturbance.replace,
}
REASONS: dict[type[BaseException], set[str]] = {
    RunInterrupted: {"a stop is requested", "Ctrl-C"},
    KeyboardInterrupt: {"Ctrl-C"},
    DataError: {"a row is bad"},
    StorageError: {"storage fails"},
    ClusterError: {"a long time"},
    LostClusterError: {"the cluster vanishes", "the mailbox is silent"},
    LeaseLostError: {"another driver takes over"},
    TrainingError: {
        "rank 0 dies",
        "all ranks die",
        "node a is lost",
        "node b is lost",
        "a minute",
        "a long time",
    },
}


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_disturbed_run_ends_for_a_reason(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        disturbance = Disturbance(Path(folder))
        error = disturbance.run(data.draw)
        driver, happened = disturbance.driver, set(disturbance.happened)
        kinds = [event.kind for event in driver.events]
        if error is None:
            assert kinds[-1] == "end"
            assert driver.run.journal.summary.step == STEPS
        else:
            assert REASONS[type(error)] & happened, f"{error!r} after {disturbance.happened}"
        if type(error) is TrainingError:
            since = [kind for kind in kinds if kind in ("checkpoint", "failure")]
            assert since[-MAX_FAILURES - 1 :] == ["failure"] * (MAX_FAILURES + 1)
        if not isinstance(error, LostClusterError) and not isinstance(
            error.__context__ if error else None, LostClusterError
        ):
            assert driver.cluster.closed
            assert not any(attempt.at_work for attempt in driver.cluster.attempts)
        if disturbance.frozen is not None:
            assert disturbance.contents() == disturbance.frozen


@pytest.mark.slow
@given(st.data())
@settings(max_examples=5000, deadline=None)
def test_thousands_of_disturbed_runs_end_for_a_reason(data: st.DataObject) -> None:
    test_a_disturbed_run_ends_for_a_reason.hypothesis.inner_test(data)  # type: ignore[attr-defined]  # of Hypothesis
