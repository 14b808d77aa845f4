"""States of a supervised run, and the transitions between them.

    Placing     waits for storage and free devices, and starts an attempt
    Preparing   the nodes of the attempt read the package, convert data and compile
    Running     the ranks train
    Resizing    the ranks write a checkpoint, since the run moves to other nodes
    Stopping    the ranks write a checkpoint, since the run was asked to stop
    Recovering  the attempt has failed: waits before the next one
    Ended       the run is over

`advance` does what can be done without waiting, and returns the next state, or the same one. It
raises the error that ends the run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from trainload.core.atomic import replace_file
from trainload.core.errors import (
    CheckpointError,
    ClusterError,
    MissingDataError,
    StorageError,
    TrainingError,
    TrainloadError,
)
from trainload.core.logs import logged_suppress
from trainload.launching.cluster.nodes import Node, resource_of
from trainload.launching.cluster.reservation import DevicesTakenError
from trainload.launching.cluster.retries import Failure
from trainload.launching.cluster.supervised_run import SupervisedRun, WatchedAttempt
from trainload.launching.cluster.why_failed import why_failed
from trainload.launching.run.activity import Phase
from trainload.launching.run.contact import Request, asked_by_file, first_of
from trainload.launching.run.journal import GIVEN_UP
from trainload.launching.run.run_spec import least_plan

_log = logging.getLogger(__name__)

GROW_SECONDS = 10.0
"""Time for which room for more ranks must have been available before a run grows."""
_REPORT_SECONDS = 30.0
TAKEN_SECONDS = 5.0
"""Maximum time to wait after devices were taken by something else."""
_GRACE_SECONDS = 1.0
"""Time without free devices after which it is reported for the first time."""
_PROBE_FILE = ".writable"
"""File in a run's folder that is written to find out if the folder is writable."""
_TRANSIENT_ERRORS = (StorageError, CheckpointError, MissingDataError)
"""Errors after which a run that has completed a step is retried, for at most `storage_patience`."""


class State(ABC):
    """A state of a supervised run."""

    def __init__(self, run: SupervisedRun) -> None:
        self.run = run

    @abstractmethod
    def advance(self) -> State:
        """Do what can be done now, and return the next state.

        Raises:
            TrainloadError: the run is over with this error.
            RayError: the cluster does not respond.
        """


class Placing(State):
    """Wait until the run's folder is writable and there is room for the ranks.

    Args:
        run: the run.
        pause: time in seconds to wait first.
    """

    def __init__(self, run: SupervisedRun, pause: float = 0.0) -> None:
        super().__init__(run)
        self._began = run.clock()
        self._first_try = self._began + pause
        self._is_writable = self._waited_for_storage = False
        self._reported_at = -float("inf")

    def advance(self) -> State:
        run = self.run
        if run.is_stopping():
            raise run.stop_error()
        run.is_time_to_look()
        if run.clock() < self._first_try:
            return self
        if not self._is_writable:
            self._is_writable = self._try_to_write()
            if not self._is_writable:
                return self
            if run.placing_since is None or self._waited_for_storage:
                run.placing_since = run.clock()
        nodes = run.cluster.nodes()
        if run.lost:
            run.lost &= run.cluster.unreachable([node.id for node in nodes if node.id in run.lost])
        fit = run.largest_fit(nodes)
        if fit is None:
            self._wait_for(nodes)
            return self
        return Preparing(run, run.begin(*fit))

    def _try_to_write(self) -> bool:
        """Return True if the run's folder is writable.

        Raises:
            StorageError: it has not been writable for too long.
        """
        run = self.run
        run.check_driver()
        try:
            replace_file(run.run_dir / _PROBE_FILE, b"", durable=False)
        except OSError as error:
            waited = run.clock() - self._began
            if not run.journal.stepped or waited > run.spec.storage_patience:
                raise StorageError(
                    f"the run's folder cannot be written: {error.strerror}",
                    where=run.spec.run_dir,
                    hint=f"When it is writable again, continue with: {run.resume_command()}",
                ) from error
            self._waited_for_storage = True
            self._report(f"for storage: {run.spec.run_dir} cannot be written: {error.strerror}")
            return False
        return True

    def _wait_for(self, nodes: list[Node]) -> None:
        """Report that there is no room for the ranks.

        Raises:
            ClusterError: there was none for too long.
        """
        run = self.run
        least = least_plan(run.spec)
        assert run.placing_since is not None, "it is set before nodes are looked for"
        name, waited = resource_of(least.cluster.device), run.clock() - run.placing_since
        free = (
            ", ".join(f"{node.free} of {node.devices}" for node in nodes if node.id not in run.lost)
            or "none"
        )
        if waited > run.spec.node_patience:
            raise ClusterError(
                "there were too few free nodes for too long",
                where=run.spec.run_dir,
                expected=f"{least.world_size} free {name}s within {run.spec.node_patience:g} s",
                got=free,
                hint=f"Continue on the available nodes with: {run.resume_command()} --workers N",
            )
        if waited > _GRACE_SECONDS:
            run.cluster.release()  # another run may wait for them, and hold what this one needs
            self._report(f"for {least.world_size} free {name}s; by node there are {free}")

    def _report(self, message: str) -> None:
        if self.run.clock() - self._reported_at > _REPORT_SECONDS:
            self._reported_at = self.run.clock()
            self.run.journal.write("waiting", message=message)


class Attempting(State):
    """A state with an attempt.

    Args:
        run: the run.
        watched: its attempt.
    """

    request = Request.NONE
    """Request of the state itself, in addition to those in the run's folder."""

    def __init__(self, run: SupervisedRun, watched: WatchedAttempt) -> None:
        super().__init__(run)
        self.watched = watched

    def advance(self) -> State:
        run = self.run
        is_stopping = run.is_stopping()
        if self.watched.watch(first_of(self.request, asked_by_file(run.run_dir))):
            return self._after()
        is_time = run.is_time_to_look()
        if is_stopping and not isinstance(self, Stopping):
            return Stopping(run, self.watched)
        return self.next(is_time=is_time)

    def next(self, *, is_time: bool) -> State:
        """Return the next state while the attempt continues; `is_time` is True once per second."""
        return self

    def _after(self) -> State:
        """Return the state after the attempt has ended."""
        run = self.run
        self.watched.attempt.end()
        run.drop_profile()
        if isinstance(self.watched.attempt.error, DevicesTakenError):
            # Two runs that want the same nodes, and have some of them each, must not retry at once.
            return Placing(run, pause=run.chance.uniform(0.0, TAKEN_SECONDS))
        run.placing_since = None
        failure = self._failure()
        if failure is not None:
            return Recovering(run, failure)
        if run.journal.ended:
            return Ended(run)
        if run.stop_requested:
            raise run.stop_error("the run was interrupted")
        return Placing(run)

    def _failure(self) -> Failure | None:
        """Return why the attempt has failed; None if it has not.

        Raises:
            TrainloadError: an error that another attempt would meet again.
        """
        run, error = self.run, self.watched.error
        if error is None:
            failure = why_failed(self.watched, run.cluster.unreachable)
            run.lost |= set(failure.nodes) if failure and failure.what == "node" else set()
            return failure
        if run.journal.stepped and isinstance(error, _TRANSIENT_ERRORS):
            return Failure("storage", str(error), cause=error)
        raise error


class _OnNodes(Attempting):
    """A state whose nodes are watched: the run leaves those that will be removed, and grows."""

    def __init__(self, run: SupervisedRun, watched: WatchedAttempt) -> None:
        super().__init__(run, watched)
        self._warned: set[str] = set()
        self._larger_since: float | None = None

    def next(self, *, is_time: bool) -> State:
        return self._watch_nodes() if is_time else self

    def _watch_nodes(self) -> State:
        """Return Resizing if the run moves to other nodes now, else this state."""
        run = self.run
        nodes = run.cluster.nodes()
        leaving = {node.id for node in nodes if node.leaving}
        draining = leaving & set(self.watched.attempt.seats)
        news = draining - self._warned
        self._warned |= news
        moves = bool(draining) and run.journal.stepped and self._room(nodes) is not None
        for node in sorted(draining if moves else news):
            run.journal.write(
                "preemption",
                node=node,
                message=f"node {node} will be removed: "
                + (
                    "the run moves to other nodes, with a checkpoint"
                    if moves
                    else "a checkpoint is written; no other node is available yet"
                ),
            )
        if moves or self._is_larger_since_long(nodes):
            return Resizing(run, self.watched)
        if news:
            with logged_suppress(_log, "no checkpoint was requested before the move", OSError):
                (run.run_dir / Request.CHECKPOINT.file).touch()
        return self

    def _room(self, nodes: list[Node]) -> int | None:
        """Return how many ranks there would be room for if this attempt were over."""
        fit = self.run.largest_fit(nodes)
        return None if fit is None else fit[0].world_size

    def _is_larger_since_long(self, nodes: list[Node]) -> bool:
        """Return True if there has been room for more ranks for a while."""
        run = self.run
        if not run.spec.plans or not self.watched.is_training:
            self._larger_since = None
            return False
        room = self._room(nodes)
        if room is None or room <= run.spec.plan.world_size:
            self._larger_since = None
        elif self._larger_since is None:
            self._larger_since = run.clock()
        return self._larger_since is not None and run.clock() - self._larger_since > GROW_SECONDS


class Preparing(_OnNodes):
    """The nodes prepare the attempt."""

    def next(self, *, is_time: bool) -> State:
        if self.watched.attempt.trains.is_set():
            return Running(self.run, self.watched)
        return super().next(is_time=is_time)


class Running(_OnNodes):
    """The ranks train."""


class Resizing(Attempting):
    """The ranks write a checkpoint and end; the run continues on other nodes."""

    request = Request.STOP


class Stopping(Attempting):
    """The ranks write a checkpoint and end, and so does the run."""

    request = Request.STOP


class Recovering(State):
    """Count a failure, and wait before the next attempt.

    Raises:
        TrainloadError: there is none, since there were too many failures in a row.
    """

    def __init__(self, run: SupervisedRun, failure: Failure) -> None:
        super().__init__(run)
        # at the end of a run the ranks have waited for storage already
        is_ending = any(beat.doing.phase is Phase.ENDING for beat in run.inbox.beats)
        stepped = run.journal.new_step() and not is_ending
        pause = run.retries.pause_after(
            failure, saved=run.journal.new_checkpoint(), stepped=stepped
        )
        run.journal.write(
            "failure",
            what=failure.what,
            message=failure.message,
            ranks=list(failure.ranks),
            nodes=list(failure.nodes),
            doing={str(rank): text for rank, text in failure.doing.items()},
            attempt=run.number,
            action=GIVEN_UP if pause is None else "it restarts from its last checkpoint",
        )
        if pause is None:
            raise self._last_error(failure) from failure.cause
        self._until = run.clock() + pause

    def advance(self) -> State:
        run = self.run
        if run.is_stopping():
            raise run.stop_error()
        run.is_time_to_look()
        return self if run.clock() < self._until else Placing(run)

    def _last_error(self, failure: Failure) -> TrainloadError:
        run = self.run
        if isinstance(failure.cause, TrainloadError):
            return failure.cause
        way = "Continue from the last checkpoint" if run.journal.has_checkpoint else "Start again"
        return TrainingError(
            failure.message,
            where=run.spec.run_dir,
            expected=f"at most {run.spec.max_failures} failures in a row without a new checkpoint",
            got="one more",
            hint=f"{way} with: {run.resume_command()}",
        )


class Ended(State):
    """The run is over."""

    def advance(self) -> State:
        return self


TRANSITIONS: Final[Mapping[type[State], frozenset[type[State]]]] = {
    Placing: frozenset({Preparing}),
    Preparing: frozenset({Running, Resizing, Stopping, Recovering, Placing, Ended}),
    Running: frozenset({Resizing, Stopping, Recovering, Placing, Ended}),
    Resizing: frozenset({Placing, Stopping, Recovering, Ended}),
    Stopping: frozenset({Placing, Recovering, Ended}),
    Recovering: frozenset({Placing}),
    Ended: frozenset(),
}
"""State -> the states that may follow it. An error that is raised in any state ends the run."""
