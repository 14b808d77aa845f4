"""Fault tolerance of a run on Ray: start attempts, each from the last checkpoint, until the run has
ended.

The driver makes decisions and writes the journal; workers train. Workers report through the
mailbox, not through the run's storage, so that a failure of storage is not mistaken for a hang.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from trainload.core.atomic import replace_file
from trainload.core.errors import (
    CheckpointError,
    ClusterError,
    LostClusterError,
    MissingDataError,
    RunInterrupted,
    StorageError,
    TrainingError,
    TrainloadError,
    first_line,
)
from trainload.core.logs import logged_suppress
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.cluster.attempt import RAY_FOLDER, Attempt, Fits
from trainload.launching.cluster.buffered_journal import BufferedJournal
from trainload.launching.cluster.mailbox import Beat, Mailbox
from trainload.launching.cluster.nodes import DrainWatcher, Node, nodes_of, resource_of, seats
from trainload.launching.cluster.tasks import NodeProbe, end_workers, last_line, on_node
from trainload.launching.run.activity import Phase
from trainload.launching.run.contact import (
    Request,
    asked_by_file,
    asked_since_lost,
    clear_requests,
    withdraw,
)
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import GIVEN_UP, POLL_SECONDS, Event, last_word
from trainload.launching.run.monitor import Hang, Monitor, in_words
from trainload.launching.run.run_spec import RunSpec, least_plan, resume_command
from trainload.launching.run.run_state import STATE_SECONDS, RankSeen, write_state
from trainload.sharding.plans.plan import Plan

_log = logging.getLogger(__name__)

_LISTEN_SECONDS = 10.0
_END_SECONDS = 20.0
_REPORT_SECONDS = 30.0
_LONGEST_PAUSE = 60.0
_LOST_SECONDS = 30.0
"""Time without a response after which a cluster is considered lost."""
_GROW_SECONDS = 10.0
"""Time for which room for more ranks must have been available before a run grows."""
_TRANSIENT_ERRORS = (StorageError, CheckpointError, MissingDataError)
"""Errors after which a run that has completed a step is retried, for at most `storage_patience`."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failed attempt whose cause another attempt may not have.

    Attributes:
        what: kind of the failure: death, node, hang, storage or error.
        message: description for people.
        ranks: ranks that failed.
        nodes: ids of nodes that failed.
        doing: rank -> its last reported activity.
        cause: exception that ended the attempt.
    """

    what: str
    message: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    doing: dict[int, str] | None = None
    cause: Exception | None = None


class Supervisor:
    """Driver of a run on the cluster to which this process is connected, and which must be large
    enough for its plan.

    Args:
        spec: the run. Its folder contains run.json.
        on_event: called with every event after it is in the journal.
        check_driver: raises LeaseLostError if another process drives the run.
    """

    def __init__(
        self, spec: RunSpec, on_event: Callable[[Event], None], check_driver: CheckDriver
    ) -> None:
        self._check_driver = check_driver
        self._run_dir = Path(spec.run_dir)
        self._journal = BufferedJournal(self._run_dir, on_event)
        self._spec = spec
        self._mailbox = on_node(ray.get_runtime_context().get_node_id())(Mailbox).remote()
        self._fits = Fits()
        self._number = 0
        self._answer = 0
        self._failures = self._storage_failures = 0
        self._storage_failed_at: float | None = None
        self._stop_requested = False
        self._moving = False
        self._beats: Sequence[Beat] = ()
        self._order: tuple[int, ...] = ()
        self._larger_since: float | None = None
        self._unheard_since: float | None = None
        self._lost: set[str] = set()
        self._probe = NodeProbe()
        self._warned: set[str] = set()

    def run(self) -> None:
        """Run all attempts; return when the run has completed its last step.

        Ctrl-C makes the workers stop after their step and write a checkpoint; so does a file "stop"
        in the run's folder. If that file was created after the previous driver was lost, the run
        stops before it begins.

        Raises:
            RunInterrupted: a stop was requested.
            TrainingError: workers failed too often without a new checkpoint in between.
            ClusterError: nodes were missing for too long.
            LeaseLostError: another process drives the run; journal, state and requests are left to
                it.
            TrainloadError: an error raised by a worker.
        """
        stop_requested = asked_since_lost(self._run_dir)
        try:
            clear_requests(self._run_dir)  # left by an attempt that was killed before it could stop
            self._run(stop_requested)
        except LeaseLostError:
            raise
        except BaseException as error:
            self._journal.say(last_word(error))
            self._write_last_state()
            raise
        self._write_last_state()

    def _write_last_state(self) -> None:
        """Say that the run has no driver any more."""
        withdraw(self._run_dir)
        self._write_state(over=True)

    def _run(self, stop_requested: bool) -> None:
        """Run all attempts. With `stop_requested`, a stop was requested before the first one."""
        try:
            with closing(self._fits):
                if stop_requested:
                    raise self._stop_error()
                while not self._attempt():
                    pass
        except LostClusterError:
            raise
        except RayError as error:  # of a call outside `_listen`, which handles its own
            raise self._lost_cluster_error(error) from error
        except BaseException:
            ray.kill(self._mailbox)
            raise
        ray.kill(self._mailbox)

    def _lost_cluster_error(self, error: RayError) -> LostClusterError:
        return LostClusterError(
            "the cluster no longer responds",
            where=str(self._run_dir),
            got=first_line(error),
            hint=f"When it responds again, continue with: {self._resume_command()}",
        )

    # One attempt

    def _attempt(self) -> bool:
        """Make one attempt; return True if the run has ended."""
        self._await_storage()
        self._check_driver()
        plan, places = self._find_seats()
        if plan.world_size != self._spec.plan.world_size:
            self._journal.write(
                "resize",
                message=f"{self._spec.plan.world_size} -> {plan.world_size} ranks",
                world=plan.world_size,
            )
        self._spec = self._spec.model_copy(update={"plan": plan})
        self._number += 1
        ray.get(self._mailbox.begin.remote(self._number))
        self._beats, self._order, self._moving = (), (), False
        self._warned = set()
        watcher = DrainWatcher(places)
        spec = self._spec.model_copy(
            update={"had_checkpoint": self._spec.had_checkpoint or self._journal.has_checkpoint}
        )
        saving = spec.storage_patience + spec.hang_timeout
        monitor = Monitor(spec.plan.world_size, spec.hang_timeout, spec.start_timeout, saving)
        attempt = Attempt(spec, self._mailbox, self._number, places)
        self._fits.start(attempt)
        try:
            failed = self._follow(attempt, monitor, watcher)
        except LostClusterError:
            raise  # without the cluster the attempt cannot be ended
        except BaseException:
            attempt.end()
            raise
        attempt.end()
        if failed is None:
            if self._stop_requested and not self._journal.ended:
                raise RunInterrupted(
                    "the run was interrupted",
                    where=str(self._run_dir),
                    hint=f"Continue with: {self._resume_command()}",
                )
            return self._journal.ended or not self._moving
        self._retry_after(failed)
        return False

    def _follow(self, attempt: Attempt, monitor: Monitor, watcher: DrainWatcher) -> _Failed | None:
        """Monitor an attempt until it has ended; return its failure, or None if it ended as
        intended.
        """
        hang: Hang | None = None
        failure: TrainloadError | None = None
        until = float("inf")
        state_written_at = 0.0
        while not attempt.ended.is_set() and time.monotonic() < until:
            try:
                failure = self._listen(monitor) or failure
                if time.monotonic() - state_written_at > STATE_SECONDS:
                    state_written_at = time.monotonic()
                    self._check_driver()
                    self._write_state()
                    self._handle_draining(watcher)
                if until == float("inf") and failure is not None:
                    until = time.monotonic() + _END_SECONDS
                if hang is None and failure is None:
                    hang = monitor.hang()
                    if hang is not None:
                        end_workers(
                            (beat.node, beat.pid) for beat in self._beats if beat.rank in hang.ranks
                        )
                        until = time.monotonic() + _END_SECONDS
                attempt.ended.wait(POLL_SECONDS)
            except KeyboardInterrupt:
                if self._stop_requested or not self._journal.stepped:
                    raise
                self._stop_requested = True
                self._journal.write(
                    "stage",
                    name=(
                        "stopping after this step, with a checkpoint; press Ctrl-C again to stop"
                        " immediately"
                    ),
                )
        failure = self._listen(monitor) or failure
        # so that the last messages of the workers are received
        while self._unheard_since is not None:
            time.sleep(POLL_SECONDS)
            failure = self._listen(monitor) or failure
        if failure is not None:
            if not (self._journal.stepped and isinstance(failure, _TRANSIENT_ERRORS)):
                raise failure
            return _Failed("storage", str(failure), cause=failure)
        if hang is not None:
            doing = {rank: str(each) for rank, each in hang.doing.items()}
            where = tuple(attempt.seats[rank] for rank in hang.ranks)
            return _Failed(
                "hang", f"{hang.why}, for {hang.seconds:.0f} s", hang.ranks, where, doing
            )
        if attempt.error is None:
            return None
        return self._failure_of(attempt)

    def _handle_draining(self, watcher: DrainWatcher) -> None:
        """Handle nodes that will be preempted: request a checkpoint, and move to other nodes once
        there is room.
        """
        draining = watcher.draining_nodes()
        news = draining.keys() - self._warned
        self._warned |= news
        goes = (
            bool(draining)
            and not self._moving
            and self._journal.stepped
            and self._find_room(watcher) is not None
        )
        self._moving = self._moving or goes
        for node, seconds in draining.items():
            if goes or node in news:
                self._journal.write(
                    "preemption",
                    node=node,
                    seconds_left=seconds,
                    message=f"node {node} will be gone"
                    + ("" if seconds is None else f" in {seconds:.0f} s")
                    + (
                        ": the run moves to other nodes, with a checkpoint"
                        if self._moving
                        else ": a checkpoint is written; no other node is available yet"
                    ),
                )
        if news and not self._moving:
            with logged_suppress(_log, "no checkpoint was requested before the move", OSError):
                (self._run_dir / Request.CHECKPOINT.file).touch()
        if self._spec.plans and not self._moving:
            self._grow(watcher)

    def _find_room(self, watcher: DrainWatcher) -> tuple[Plan, list[str]] | None:
        """Return the plan and seats that would fit if this attempt were over; None if none
        would.
        """
        return self._largest_fit(watcher.without_us(nodes_of(self._spec.plan.cluster.device)))

    def _grow(self, watcher: DrainWatcher) -> None:
        """Move to more nodes if they have been available for a while.

        The workers write a checkpoint first.
        """
        fit = self._find_room(watcher)
        larger = fit is not None and fit[0].world_size > self._spec.plan.world_size
        if (
            not larger
            or not self._beats
            or any(beat.doing.phase is Phase.STARTING for beat in self._beats)
        ):
            self._larger_since = None
        elif self._larger_since is None:
            self._larger_since = time.monotonic()
        elif time.monotonic() - self._larger_since > _GROW_SECONDS:
            self._larger_since, self._moving = None, True

    def _failure_of(self, attempt: Attempt) -> _Failed:
        """Return the reason why Ray Train ended the attempt."""
        assert attempt.error is not None
        worker_errors: dict[int, Exception] = getattr(attempt.error, "worker_failures", None) or {}
        text = last_line(str(next(iter(worker_errors.values()), attempt.error)))
        by_rank = {
            self._order[number] if number < len(self._order) else number: error
            for number, error in worker_errors.items()
        }
        died = tuple(rank for rank, error in sorted(by_rank.items()) if _is_death(error))
        # A worker that raised proves that its node is alive, however busy. So only nodes of workers
        # that died are probed, or all nodes if no worker began.
        suspects = {attempt.seats[rank] for rank in died} if worker_errors else set(attempt.seats)
        gone = self._probe.unreachable(suspects)
        self._lost |= gone
        doing = {beat.rank: str(beat.doing) for beat in self._beats}
        if gone:
            ranks = tuple(rank for rank, seat in enumerate(attempt.seats) if seat in gone)
            names = ", ".join(sorted(gone))
            return _Failed(
                "node",
                f"node {names} is gone, with {in_words(ranks)}",
                ranks,
                tuple(sorted(gone)),
                doing,
                attempt.error,
            )
        if not worker_errors:
            return _Failed(
                "error", f"the workers could not be started: {text}", (), (), doing, attempt.error
            )
        ranks = died or tuple(sorted(by_rank))
        return _Failed(
            "death",
            f"{in_words(ranks)} {'died' if died else 'failed'}: {text}",
            ranks,
            (),
            doing,
            attempt.error,
        )

    def _retry_after(self, failed: _Failed) -> None:
        """Decide whether there is another attempt, and wait before it; otherwise raise the error
        that ends the run.
        """
        if self._journal.new_checkpoint():
            self._failures, self._storage_failures, self._storage_failed_at = 0, 0, None
        if self._journal.new_step() and all(
            beat.doing.phase is not Phase.ENDING for beat in self._beats
        ):
            # at the end of a run the workers have waited for storage already
            self._storage_failures, self._storage_failed_at = 0, None
        if failed.what == "storage":
            self._storage_failed_at = self._storage_failed_at or time.monotonic()
            over = time.monotonic() - self._storage_failed_at > self._spec.storage_patience
            self._storage_failures += 1
        else:
            over = self._failures >= self._spec.max_failures
            self._failures += 1
        self._journal.write(
            "failure",
            what=failed.what,
            message=failed.message,
            ranks=list(failed.ranks),
            nodes=list(failed.nodes),
            doing={str(rank): text for rank, text in (failed.doing or {}).items()},
            attempt=self._number,
            action=GIVEN_UP if over else "it restarts from its last checkpoint",
        )
        if over:
            if isinstance(failed.cause, TrainloadError):
                raise failed.cause
            way = (
                "Continue from the last checkpoint"
                if self._journal.has_checkpoint
                else "Start again"
            )
            raise TrainingError(
                failed.message,
                where=str(self._run_dir),
                expected=(
                    f"at most {self._spec.max_failures} failures in a row without a new checkpoint"
                ),
                got="one more",
                hint=f"{way} with: {self._resume_command()}",
            ) from failed.cause
        again = self._failures + self._storage_failures - 1
        if again > 0:
            self._pause(min(_LONGEST_PAUSE, 2.0**again))

    def _pause(self, seconds: float) -> None:
        """Wait before another attempt, updating the run's state; raise RunInterrupted if a stop is
        requested meanwhile.
        """
        until, state_written_at = time.monotonic() + seconds, -float("inf")
        while time.monotonic() < until:
            if asked_by_file(self._run_dir) is Request.STOP:
                raise self._stop_error()
            if time.monotonic() - state_written_at > STATE_SECONDS:
                state_written_at = time.monotonic()
                self._write_state()
            time.sleep(POLL_SECONDS)

    def _stop_error(self) -> RunInterrupted:
        return RunInterrupted(
            "the run was asked to stop",
            where=str(self._run_dir),
            hint=f"Continue with: {self._resume_command()}",
        )

    def _resume_command(self) -> str:
        return resume_command(self._run_dir)

    # Messages of the workers

    def _listen(self, monitor: Monitor) -> TrainloadError | None:
        """Receive the workers' messages and send them the pending request; return the error of a
        worker that failed.
        """
        pending = asked_by_file(self._run_dir)
        self._stop_requested = self._stop_requested or pending is Request.STOP
        pending = Request.STOP if self._stop_requested or self._moving else pending
        try:
            collected = ray.get(
                self._mailbox.collect.remote(pending, self._journal.written, self._answer),
                timeout=_LISTEN_SECONDS,
            )
        except RayError as error:
            self._unheard_since = self._unheard_since or time.monotonic()
            if (
                not isinstance(error, ActorDiedError)
                and time.monotonic() - self._unheard_since < _LOST_SECONDS
            ):
                return None
            raise self._lost_cluster_error(error) from error
        self._unheard_since = None
        self._answer = collected.number
        self._journal.take(collected.events)
        self._journal.keep(collected.printed)
        self._beats, self._order = collected.beats or self._beats, collected.order
        for beat in collected.beats:
            monitor.hear(beat.rank, beat.doing, beat.age)
        if collected.met:
            withdraw(self._run_dir, *collected.met)
        failure: TrainloadError | None = collected.failure
        return failure

    def _write_state(self, *, over: bool = False) -> None:
        """Write the run's state for `trainload status`.

        If storage fails, this update is skipped.
        """
        ranks = {
            beat.rank: RankSeen.of(beat.node, beat.pid, beat.age, beat.doing)
            for beat in self._beats
        }
        # repeated every second, so the next update may succeed
        message = "the state of the run was not written"
        with logged_suppress(_log, message, OSError, level=logging.DEBUG):
            write_state(self._run_dir, self._number, self._journal.summary, ranks, over=over)

    # Requirements of an attempt

    def _await_storage(self) -> None:
        """Wait until the run's folder is writable.

        Raises:
            StorageError: it has not been writable for too long.
            RunInterrupted: a stop was requested meanwhile.
        """
        began, reported_at = time.monotonic(), 0.0
        while True:
            try:
                (self._run_dir / RAY_FOLDER).mkdir(exist_ok=True)
                replace_file(self._run_dir / RAY_FOLDER / "here", b"", durable=False)
                return
            except OSError as error:
                if (
                    not self._journal.stepped
                    or time.monotonic() - began > self._spec.storage_patience
                ):
                    raise StorageError(
                        f"the run's folder cannot be written: {error.strerror}",
                        where=str(self._run_dir),
                        hint=f"When it is writable again, continue with: {self._resume_command()}",
                    ) from error
                if time.monotonic() - reported_at > _REPORT_SECONDS:
                    reported_at = time.monotonic()
                    self._journal.write(
                        "waiting",
                        message=f"for storage: {self._run_dir} cannot be written: {error.strerror}",
                    )
            self._pause(POLL_SECONDS * 10)

    def _largest_fit(self, nodes: Sequence[Node]) -> tuple[Plan, list[str]] | None:
        """Return the largest of the run's plans that fits these nodes, and the node of each of its
        ranks; None if none fits.
        """
        for plan in reversed(self._spec.plans or (self._spec.plan,)):
            node_ids = seats(plan, nodes, without=self._lost)
            if node_ids is not None:
                return plan, node_ids
        return None

    def _find_seats(self) -> tuple[Plan, list[str]]:
        """Wait until there is room for the workers; return the plan of the next attempt and the
        node of each rank.

        Raises:
            ClusterError: there was no room for too long.
            RunInterrupted: a stop was requested meanwhile.
        """
        least = least_plan(self._spec)
        began, reported_at = time.monotonic(), 0.0
        while True:
            nodes = nodes_of(least.cluster.device)
            self._probe.forget([node.id for node in nodes])
            if self._lost:
                self._lost &= self._probe.unreachable(
                    [node.id for node in nodes if node.id in self._lost]
                )
            fit = self._largest_fit(nodes)
            if fit is not None:
                return fit
            name = resource_of(least.cluster.device)
            free = (
                ", ".join(f"{n.free} of {n.devices}" for n in nodes if n.id not in self._lost)
                or "none"
            )
            if time.monotonic() - began > self._spec.node_patience:
                raise ClusterError(
                    "there were too few free nodes for too long",
                    where=str(self._run_dir),
                    expected=(
                        f"{least.world_size} free {name}s within {self._spec.node_patience:g} s"
                    ),
                    got=free,
                    hint=(
                        f"Continue on the available nodes with: {self._resume_command()}"
                        " --workers N"
                    ),
                )
            if (
                time.monotonic() - reported_at > _REPORT_SECONDS
                and time.monotonic() - began > POLL_SECONDS * 10
            ):
                reported_at = time.monotonic()
                self._journal.write(
                    "waiting",
                    message=f"for {least.world_size} free {name}s; by node there are {free}",
                )
            self._pause(POLL_SECONDS * 5)


def _is_death(error: Exception) -> bool:
    """Return True if Ray Train's error means that a worker's process has died."""
    return isinstance(getattr(error, "health_check_failure", error), RayActorError)
