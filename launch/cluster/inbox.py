"""Driver's end of the mailbox: receive the messages of the ranks, and send them requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ray.exceptions import ActorDiedError, RayError

from trainload.core.errors import TrainloadError
from trainload.launching.cluster.buffered_journal import BufferedJournal
from trainload.launching.cluster.mailbox import Beat, Collected
from trainload.launching.run.contact import Wanted, withdraw
from trainload.launching.run.driver import CheckDriver

LOST_SECONDS = 30.0
"""Time without a response after which a cluster is considered lost."""
Collect = Callable[[Wanted, int, int], Collected]
"""`Mailbox.collect`, which raises RayError if the mailbox does not respond."""


class Inbox:
    """Receiver of the messages of a run's ranks.

    Events and output are written to the run's folder, and fulfilled requests are withdrawn.

    Args:
        collect: calls the mailbox.
        run_dir: the run's folder.
        journal: the run's journal.
        check_driver: raises LeaseLostError if another process drives the run.
        clock: function that returns the time in seconds.

    Attributes:
        beats: last heartbeat of each rank of the attempt.
    """

    def __init__(
        self,
        collect: Collect,
        run_dir: Path,
        journal: BufferedJournal,
        check_driver: CheckDriver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collect = collect
        self._run_dir = run_dir
        self._journal = journal
        self._check_driver = check_driver
        self._clock = clock
        self._number = 0
        self._silent_since: float | None = None
        self.beats: Sequence[Beat] = ()

    @property
    def silent(self) -> bool:
        """True if the mailbox did not respond to the last call."""
        return self._silent_since is not None

    def begin(self) -> None:
        """Forget the heartbeats of an earlier attempt."""
        self.beats = ()

    def receive(self, request: Wanted) -> tuple[Sequence[Beat], TrainloadError | None]:
        """Receive messages.

        Args:
            request: pending request for the ranks.

        Returns:
            New heartbeats, and the first error that ended a rank of the attempt.

        Raises:
            RayError: the mailbox has not responded for too long.
        """
        try:
            collected = self._collect(request, self._journal.written, self._number)
        except RayError as error:
            now = self._clock()
            if self._silent_since is None:
                self._silent_since = now
            if isinstance(error, ActorDiedError) or now - self._silent_since >= LOST_SECONDS:
                raise
            return (), None
        self._silent_since = None
        self._number = collected.number
        self._journal.take(collected.events)
        self._journal.keep(collected.printed)
        self.beats = collected.beats or self.beats
        if collected.met:
            self._check_driver()
            withdraw(self._run_dir, *collected.met)
        return collected.beats, collected.failure
