"""A run that a driver supervises: what the states of the run have in common."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from threading import Event as Flag
from typing import Protocol

from trainload.core.errors import RunInterrupted, TrainloadError
from trainload.core.logs import logged_suppress
from trainload.launching.cluster.buffered_journal import BufferedJournal
from trainload.launching.cluster.inbox import Inbox
from trainload.launching.cluster.mailbox import Collected
from trainload.launching.cluster.nodes import Node, seats
from trainload.launching.cluster.retries import Retries
from trainload.launching.run.activity import Phase
from trainload.launching.run.contact import (
    Request,
    Wanted,
    asked_by_file,
    asked_profile,
    withdraw,
)
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import Event
from trainload.launching.run.monitor import Hang, Monitor
from trainload.launching.run.publication import Publication
from trainload.launching.run.run_directory import resume_command
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.run.run_state import STATE_SECONDS, RankSeen, write_state
from trainload.launching.run.straggler import Stragglers, peers_of
from trainload.sharding.plans.plan import Plan

_log = logging.getLogger(__name__)

_END_SECONDS = 20.0
"""Time in which an attempt must end by itself once a rank has failed or hangs."""


class AnyAttempt(Protocol):
    """An attempt that has been started; see `cluster.attempt.Attempt`."""

    seats: tuple[str, ...]
    trains: Flag
    ended: Flag
    error: Exception | None

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks that hang."""

    def end(self) -> None:
        """End the attempt if it is not over, and wait for its end."""


class AnyCluster(Protocol):
    """The cluster of a run; see `ray_cluster.RayCluster`.

    Its methods raise RayError if it does not respond.
    """

    def nodes(self) -> list[Node]:
        """Return the nodes, with the devices that the run uses counted as free."""

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        """Return those of these nodes that do not respond within a few seconds."""

    def start(self, spec: RunSpec, number: int, seats: Sequence[str]) -> AnyAttempt:
        """Start an attempt."""

    def collect(self, request: Wanted, written: int, number: int) -> Collected:
        """Collect messages; see `Mailbox.collect`."""

    def release(self) -> None:
        """Release the nodes of the last attempt, so that others may use them."""

    def close(self) -> None:
        """Release the nodes, and end the mailbox."""


class SupervisedRun:
    """A run with its journal, its cluster and what its driver remembers.

    Args:
        spec: the run.
        cluster: the cluster.
        on_event: called with every event after it is in the journal.
        check_driver: raises LeaseLostError if another process drives the run.
        clock: function that returns the time in seconds.
        publication: publishes the run's records.

    Attributes:
        spec: the run, with the plan of the last attempt.
        lost: ids of nodes that did not respond; they are not used until they respond.
        stop_requested: True once the run was asked to stop.
        number: number of the last attempt.
        chance: random numbers, which differ between runs.
        placing_since: when the run began to wait for nodes; None after an attempt that had them.
    """

    def __init__(
        self,
        spec: RunSpec,
        cluster: AnyCluster,
        on_event: Callable[[Event], None],
        check_driver: CheckDriver,
        clock: Callable[[], float] = time.monotonic,
        publication: Publication | None = None,
    ) -> None:
        self.spec = spec
        self.cluster = cluster
        self.check_driver = check_driver
        self.clock = clock
        self.run_dir = spec.folder
        self.publication = publication or Publication(spec.folder, patience=spec.storage_patience)
        self.journal = BufferedJournal(
            self.run_dir, on_event, check_driver, self.publication.published
        )
        self.inbox = Inbox(cluster.collect, self.run_dir, self.journal, check_driver, clock)
        self.retries = Retries(spec.max_failures, spec.storage_patience, clock)
        self.lost: set[str] = set()
        self.stop_requested = False
        self.number = 0
        self.placing_since: float | None = None
        self.chance = random.Random()
        self._looked_at = -float("inf")

    def is_stopping(self) -> bool:
        """Return True if the run was asked to stop."""
        self.stop_requested = self.stop_requested or asked_by_file(self.run_dir) is Request.STOP
        return self.stop_requested

    def drop_profile(self) -> None:
        """Withdraw the request for a profile that an attempt which is over did not complete, so
        that the next one does not meet it.

        Raises:
            LeaseLostError: another process drives the run.
        """
        request = None
        with logged_suppress(_log, "it is unknown whether a profile is requested", OSError):
            request = asked_profile(self.run_dir)
        if request is not None:
            error = "the attempt ended before the profile was complete"
            self.journal.write("profile", id=request.id, error=error)
            self.check_driver()
            withdraw(self.run_dir, request)

    def stop_error(self, message: str = "the run was asked to stop") -> RunInterrupted:
        """Return the error that ends a run that was asked to stop."""
        return RunInterrupted(
            message,
            where=self.spec.run_dir,
            hint=f"Continue with: {self.resume_command()}",
        )

    def resume_command(self) -> str:
        """Return the command that continues the run."""
        return resume_command(self.spec.run_dir)

    def is_time_to_look(self) -> bool:
        """Return True once per second, after the run's state was written.

        Raises:
            LeaseLostError: another process drives the run.
            StorageError: the run's records cannot be published for too long.
        """
        now = self.clock()
        if now - self._looked_at < STATE_SECONDS:
            return False
        self._looked_at = now
        self.write_state()
        self.publication.check(lambda message: self.journal.write("warning", message=message))
        return True

    def write_state(self, *, over: bool = False) -> None:
        """Write the run's state for `trainload status`. If storage fails, this update is skipped.

        Args:
            over: True if the run has no driver from now on.

        Raises:
            LeaseLostError: another process drives the run.
        """
        self.check_driver()
        ranks = {
            beat.rank: RankSeen.of(beat.node, beat.pid, beat.age, beat.doing)
            for beat in self.inbox.beats
        }
        # repeated every second, so the next update may succeed
        message = "the state of the run was not written"
        with logged_suppress(_log, message, OSError, level=logging.DEBUG):
            write_state(self.run_dir, self.number, self.journal.summary, ranks, over=over)

    def largest_fit(self, nodes: Sequence[Node]) -> tuple[Plan, list[str]] | None:
        """Return the largest of the run's plans that fits these nodes, and the node of each of its
        ranks; None if none fits.
        """
        for plan in reversed(self.spec.plans or (self.spec.plan,)):
            node_ids = seats(plan, nodes, without=self.lost)
            if node_ids is not None:
                return plan, node_ids
        return None

    def begin(self, plan: Plan, node_ids: Sequence[str]) -> WatchedAttempt:
        """Start an attempt.

        Raises:
            LeaseLostError: another process drives the run.
        """
        self.check_driver()
        if plan.world_size != self.spec.plan.world_size:
            self.journal.write(
                "resize",
                message=f"{self.spec.plan.world_size} -> {plan.world_size} ranks",
                world=plan.world_size,
            )
        self.spec = self.spec.model_copy(
            update={
                "plan": plan,
                "had_checkpoint": self.spec.had_checkpoint or self.journal.has_checkpoint,
            }
        )
        self.number += 1
        self.inbox.begin()
        return WatchedAttempt(self, self.cluster.start(self.spec, self.number, node_ids))


class WatchedAttempt:
    """A running attempt, and what the driver has heard of it.

    Attributes:
        attempt: the attempt.
        hang: the hang because of which ranks were killed; None if there was none.
        error: first error that ended a rank.
        doing: rank -> its last reported activity.
    """

    def __init__(self, run: SupervisedRun, attempt: AnyAttempt) -> None:
        self._run = run
        self.attempt = attempt
        spec = run.spec
        self._monitor = Monitor(
            spec.plan.world_size,
            spec.hang_timeout,
            spec.start_timeout,
            spec.storage_patience + spec.hang_timeout,
            run.clock,
        )
        self._stragglers = Stragglers(peers_of(spec.plan), spec.straggler_factor, run.clock)
        self._until = float("inf")
        self.hang: Hang | None = None
        self.error: TrainloadError | None = None

    @property
    def doing(self) -> dict[int, str]:
        return {beat.rank: str(beat.doing) for beat in self._run.inbox.beats}

    @property
    def is_training(self) -> bool:
        """True if all ranks have reported that they have started."""
        beats = self._run.inbox.beats
        return bool(beats) and all(beat.doing.phase is not Phase.STARTING for beat in beats)

    def watch(self, request: Wanted) -> bool:
        """Receive messages, and kill ranks that hang.

        Args:
            request: pending request for the ranks.

        Returns:
            True if the attempt is over, and its last messages have been received.
        """
        run = self._run
        is_over = self.attempt.ended.is_set() or run.clock() >= self._until
        beats, error = run.inbox.receive(request)
        if self.attempt.trains.is_set():
            self._monitor.begin()
        for beat in beats:
            self._monitor.hear(beat.rank, beat.doing, beat.age)
            self._stragglers.hear(beat.rank, beat.doing)
        self._report_stragglers()
        self.error = self.error or error
        if is_over:
            return not run.inbox.silent
        if self._until == float("inf"):
            if self.error is None:
                self.hang = self._monitor.hang()
            if self.hang is not None:
                run.check_driver()
                self.attempt.kill(self.hang.ranks)
            if self.error is not None or self.hang is not None:
                self._until = run.clock() + _END_SECONDS
        return False

    def _report_stragglers(self) -> None:
        beats = {beat.rank: beat for beat in self._run.inbox.beats}
        for each in self._stragglers.found():
            node, device = beats[each.rank].node, beats[each.rank].device
            self._run.journal.write(
                "warning",
                message=(
                    f"rank {each.rank} (node {node}, {device}) is {each.factor:.1f} times slower"
                    f" than the others: {each.seconds:.3g} s of its own work per step, over the"
                    f" last {each.steps} steps"
                ),
                rank=each.rank,
                node=node,
                device=device,
                factor=each.factor,
            )
