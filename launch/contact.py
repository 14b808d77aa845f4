"""How a worker talks to whoever runs it: what happened goes out, requests come in."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from trainload.launch.activity import Activity
from trainload.launch.journal import Journal


class Request(IntEnum):
    """What a run can be asked for; of several at once the greatest counts."""

    NONE = 0
    CHECKPOINT = 1
    STOP = 2

    @property
    def file(self) -> str:
        """Whoever makes a file of this name in the run's folder asks for it."""
        return {Request.CHECKPOINT: "checkpoint-now", Request.STOP: "stop"}[self]


def asked_by_file(run_dir: Path) -> Request:
    """What the files in a run's folder ask for."""
    return max((request for request in (Request.CHECKPOINT, Request.STOP) if (run_dir / request.file).exists()), default=Request.NONE)


def take_back(run_dir: Path, *requests: Request) -> None:
    """Removes the files of requests that were met, or concern an attempt that is over."""
    for request in requests or (Request.CHECKPOINT, Request.STOP):
        (run_dir / request.file).unlink(missing_ok=True)


class Contact(Protocol):
    """One rank's."""

    def write(self, kind: str, **data: Any) -> None:
        """Tells of an event, for the journal. It may be on its way when this returns."""

    def flush(self) -> None:
        """Returns when the journal has what was written so far, or cannot have it for now."""

    def asked(self) -> Request:
        """What the run was asked for. Called by rank 0 alone."""

    def met(self, request: Request) -> None:
        """A request was met; it is not asked again."""

    def report(self, activity: Activity) -> None:
        """From now on tells what this rank does, until `close`."""

    def close(self) -> None:
        """Nothing more will be said. What was written is flushed."""


class FileContact:
    """A worker that Ray does not run writes the journal and reads the files of requests itself. Nobody watches over it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._journal = Journal(run_dir)

    def write(self, kind: str, **data: Any) -> None:
        self._journal.write(kind, **data)

    def flush(self) -> None:
        """It is written already."""

    def asked(self) -> Request:
        return asked_by_file(self._run_dir)

    def met(self, request: Request) -> None:
        take_back(self._run_dir, request)

    def report(self, activity: Activity) -> None:
        """To nobody."""

    def close(self) -> None:
        """Nothing is held."""
