"""The journal as the driver of a run keeps it, also while storage does not take it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError
from trainload.launching.run.journal import Event, Journal, append_log, stream_events
from trainload.launching.run.run_state import Summary


class Book:
    """Writes a run's journal. What storage does not take is kept, and written when it does.

    Args:
        run_dir: the run's folder.
        on_event: told of every event.

    Attributes:
        written: how many of the workers' events the journal has.
        stepped, ended: whether there was a step, the run's last step, since this was made.
        summary: what all events of the run come to.
    """

    def __init__(self, run_dir: Path, on_event: Callable[[Event], None]) -> None:
        self._journal = Journal(run_dir)
        self._run_dir = run_dir
        self._on_event = on_event
        self._unwritten: list[Event] = []
        self._owed = 0
        self._new_checkpoint = self._new_step = False
        self._warned = False
        self.summary = Summary.of(stream_events(run_dir))
        self.written = 0
        self.stepped = self.ended = False

    def write(self, kind: str, **data: Any) -> None:
        """Something that the driver itself has to say."""
        self.say(Event(kind, data, time.time()))

    def say(self, event: Event) -> None:
        """The same, of an event."""
        self._take([event])

    def take(self, events: Sequence[Event]) -> None:
        """What workers have said. Without any: what is unwritten is tried again."""
        self._owed += len(events)
        self._take(events)
        if not self._unwritten:
            self.written, self._owed = self.written + self._owed, 0

    def keep(self, printed: Mapping[int, str]) -> None:
        """What ranks have printed. Where storage fails, it is lost."""
        for rank, text in printed.items():
            append_log(self._run_dir, rank, text)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has ever published one."""
        return self.summary.checkpoint is not None

    def new_checkpoint(self) -> bool:
        """Whether one was published since this was last asked."""
        found, self._new_checkpoint = self._new_checkpoint, False
        return found

    def new_step(self) -> bool:
        """Whether there was a step since this was last asked."""
        found, self._new_step = self._new_step, False
        return found

    def _take(self, events: Sequence[Event]) -> None:
        self._unwritten += events
        if self._unwritten:
            try:
                self._journal.append(self._unwritten)
                self._warned = False
            except StorageError as error:
                if not self._warned:
                    self._warned = True
                    self._on_event(Event("warning", {"message": f"{error} What happens is kept, and written when it can be."}, time.time()))
        for event in events:
            self.summary.take(event)
            self._new_step = self._new_step or event.kind == "step"
            self.stepped = self.stepped or event.kind == "step"
            self.ended = self.ended or event.kind == "end"
            self._new_checkpoint = self._new_checkpoint or event.kind == "checkpoint"
            self._on_event(event)
