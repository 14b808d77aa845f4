"""Journal of a run in its driver, buffered while storage fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import Event, Journal, append_log, stream_events
from trainload.launching.run.run_state import Summary


class BufferedJournal:
    """Writer of a run's journal. Events that storage rejects are buffered, and written when it
    works again.

    Args:
        run_dir: the run's folder.
        on_event: called with every event.
        check_driver: raises LeaseLostError if another process drives the run; called before
            anything is written.
        published: returns the number of bytes of the journal that others can read.

    Attributes:
        written: number of the workers' events that are in the journal, and published.
        stepped: True if there was a step since this object was created.
        ended: True if the run's last step was since then.
        summary: summary of all events of the run.
    """

    def __init__(
        self,
        run_dir: Path,
        on_event: Callable[[Event], None],
        check_driver: CheckDriver = lambda: None,
        published: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self._published = published
        self._in_journal: deque[tuple[int, int]] = deque()
        self._journal = Journal(run_dir)
        self._check_driver = check_driver
        self._run_dir = run_dir
        self._on_event = on_event
        self._unwritten: list[Event] = []
        self._unacknowledged = 0
        self._new_checkpoint = self._new_step = False
        self._warned = False
        self.summary = Summary.of(stream_events(run_dir))
        self.written = 0
        self.stepped = self.ended = False

    def write(self, kind: str, **data: Any) -> None:
        """Write an event of the driver itself."""
        self.say(Event(kind, data, time.time()))

    def say(self, event: Event) -> None:
        """Write an existing event of the driver itself."""
        self._append([event])

    def take(self, events: Sequence[Event]) -> None:
        """Write events of workers, and buffered ones.

        With no events, only retry the buffered ones.
        """
        self._unacknowledged += len(events)
        self._append(events)
        if self._unacknowledged and not self._unwritten:
            self._in_journal.append((self._journal.size(), self._unacknowledged))
            self._unacknowledged = 0
        while self._in_journal and self._in_journal[0][0] <= self._published():
            self.written += self._in_journal.popleft()[1]

    def keep(self, printed: Mapping[int, str]) -> None:
        """Append the output of ranks to their logs. It is lost if storage fails."""
        if printed:
            self._check_driver()
        for rank, text in printed.items():
            append_log(self._run_dir, rank, text)

    @property
    def has_checkpoint(self) -> bool:
        """True if the run has ever published a checkpoint."""
        return self.summary.checkpoint is not None

    def new_checkpoint(self) -> bool:
        """Return True if a checkpoint was published since the last call."""
        is_new, self._new_checkpoint = self._new_checkpoint, False
        return is_new

    def new_step(self) -> bool:
        """Return True if there was a step since the last call."""
        is_new, self._new_step = self._new_step, False
        return is_new

    def _append(self, events: Sequence[Event]) -> None:
        self._unwritten += events
        if self._unwritten:
            self._check_driver()
            try:
                self._journal.append(self._unwritten)
                self._warned = False
            except StorageError as error:
                if not self._warned:
                    self._warned = True
                    self._on_event(
                        Event(
                            "warning",
                            {
                                "message": (
                                    f"{error} Events are kept in memory and written as soon as"
                                    " possible."
                                )
                            },
                            time.time(),
                        )
                    )
        for event in events:
            self.summary.take(event)
            self._new_step = self._new_step or event.kind == "step"
            self.stepped = self.stepped or event.kind == "step"
            self.ended = self.ended or event.kind == "end"
            self._new_checkpoint = self._new_checkpoint or event.kind == "checkpoint"
            self._on_event(event)
