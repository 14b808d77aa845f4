"""The journal of a run: events as JSON lines, appended by the workers, followed by whoever watches."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.errors import RunInterrupted, StorageError
from trainload.core.reading import reading
from trainload.core.redaction import redacted_data

JOURNAL = "events.jsonl"
LOGS = "logs"
"""The folder of a run's folder with what each rank has printed."""
GIVEN_UP = "the run ends"
"""What is done about a failure after which there is no other attempt."""
POLL_SECONDS = 0.1
"""How often a journal is looked at by those who follow it."""


def log_name(rank: int) -> str:
    """The name of a rank's file in `LOGS`."""
    return f"rank-{rank:05}.log"


def append_log(run_dir: Path, rank: int, text: str) -> None:
    """Append text to a rank's log. If storage fails, the text is discarded."""
    with suppress(OSError):
        (run_dir / LOGS).mkdir(exist_ok=True)
        with (run_dir / LOGS / log_name(rank)).open("a", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def tracebacks_to(write: Callable[[str], object]) -> Iterator[None]:
    """Pass the traceback of an exception raised inside to `write`, and raise it again. An interrupted run has none to report."""
    try:
        yield
    except RunInterrupted:
        raise
    except Exception:
        write(traceback.format_exc())
        raise


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `time`: seconds since 1970.

    `kind`: start (of an attempt), stage, step, eval, checkpoint (one was published), warning, waiting (for nodes), failure (of an attempt:
    what happened, and what is done about it), preemption (of a node, announced), resize (of the world), end (of the last
    step), failed or stopped (of the run). Its texts hold no credentials.
    """

    kind: str
    data: Mapping[str, Any]
    time: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", redacted_data(self.data))


def event_of(line: str | bytes) -> Event | None:
    """What a line of the journal says; None for a torn one: its writer was killed, or its disk full."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return Event(entry["kind"], entry["data"], entry["time"])


class Journal:
    """Appends events. One line is one write, so that the lines of several processes do not mix."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL

    def write(self, kind: str, **data: Any) -> None:
        """Appends an event. `data` is JSON; NaN is written as such, since a diverged loss must be seen.

        Raises:
            StorageError: the disk is full, or the run's folder is gone.
        """
        self.append([Event(kind, data, time.time())])

    def append(self, events: list[Event]) -> None:
        """Appends events that have happened, and takes them out of the list: all of them, or those that were written before it raises.

        Raises: as `write`.
        """
        lines = [
            json.dumps({"kind": each.kind, "time": each.time, "data": dict(each.data)}, separators=(",", ":")) + "\n" for each in events
        ]
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                torn = "" if _ends_whole(descriptor) else "\n"
                data = "".join((torn, *lines)).encode()
                written = os.write(descriptor, data)
                del events[: data[len(torn) : written].count(b"\n")]
                if written < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            hint = "Make room, and resume the run." if error.errno == errno.ENOSPC else ""
            raise StorageError(f"the journal cannot be written: {error.strerror}", where=str(self._path), hint=hint) from error


def _ends_whole(descriptor: int) -> bool:
    """Whether the last line of a file is whole: that of a process that was killed, or whose disk was full, need not be."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


class Follower:
    """Reads a journal as it grows, one line at a time: it may be larger than the memory that there is. Only whole lines count: the last
    one may be half written, by a worker that was killed.

    Raises: StorageError where the journal is there and cannot be read.
    """

    def __init__(self, run_dir: Path, *, from_end: bool = False) -> None:
        self._path = run_dir / JOURNAL
        with reading("the journal", self._path):
            self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0

    def new(self) -> Iterator[Event]:
        """The events since the last call. Raises: as the class."""
        with reading("the journal", self._path):
            if not self._path.exists():
                return
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    event = event_of(line)
                    if event is not None:
                        yield event


@contextmanager
def followed(run_dir: Path, on_event: Callable[[Event], None]) -> Iterator[None]:
    """Within it a thread tells `on_event` what this and other processes write from now on; all of it, by the end, where it can be read."""
    follower = Follower(run_dir, from_end=True)
    ended = threading.Event()

    def tell() -> None:
        with suppress(StorageError):  # what cannot be read now is told later
            for event in follower.new():
                on_event(event)

    def follow() -> None:
        while not ended.wait(POLL_SECONDS):
            tell()

    thread = threading.Thread(target=follow, name="journal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        tell()


def stream_events(run_dir: Path) -> Iterator[Event]:
    """All events of a run so far, one by one. Raises: as `Follower`."""
    return Follower(run_dir).new()


def read_events(run_dir: Path) -> list[Event]:
    """All events of a run so far, at once: those of a million steps take 2.3 GiB. Raises: as `Follower`."""
    return list(stream_events(run_dir))


def losses(events: Iterable[Event]) -> list[float]:
    """The loss of every step, in order; steps that were repeated after a restart count once, as they were last."""
    by_step = {int(e.data["step"]): float(e.data["loss"]) for e in events if e.kind == "step"}
    return [by_step[s] for s in sorted(by_step)]


def last_word(error: BaseException) -> Event:
    """The event by which a run that did not do its last step ends."""
    kind = "stopped" if isinstance(error, RunInterrupted | KeyboardInterrupt) else "failed"
    message = str(error) or ("ended at once, without a checkpoint" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    return Event(kind, {"error": type(error).__name__, "message": message}, time.time())
