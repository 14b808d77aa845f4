"""The journal of a run: events as JSON lines, which are appended while others follow the file."""

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
"""Subfolder of a run's folder with the output of each rank."""
GIVEN_UP = "the run ends"
"""The `action` of a failure after which there is no other attempt."""
POLL_SECONDS = 0.1
"""Polling interval of those who follow a journal."""


def log_name(rank: int) -> str:
    """Return the name of a rank's file in `LOGS`."""
    return f"rank-{rank:05}.log"


def append_log(run_dir: Path, rank: int, text: str) -> None:
    """Append text to a rank's log. If storage fails, the text is discarded."""
    with suppress(OSError):
        (run_dir / LOGS).mkdir(exist_ok=True)
        with (run_dir / LOGS / log_name(rank)).open("a", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def tracebacks_to(write: Callable[[str], object]) -> Iterator[None]:
    """Pass the traceback of an exception raised in the context to `write`, and re-raise it.

    RunInterrupted is only re-raised.
    """
    try:
        yield
    except RunInterrupted:
        raise
    except Exception:
        write(traceback.format_exc())
        raise


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run. Credentials in its texts are redacted.

    Attributes:
        kind: start (of an attempt), stage, step, statistics (of a step), finding (the first bad
            value of a step), eval, checkpoint (published), profile (complete, or why it is not),
            warning, waiting (for nodes or storage), failure (of an attempt, with the action that
            follows), preemption (of a node, announced), resize (of the world), end (after the last
            step), failed or stopped (the run), driver (one has begun to drive a run at a URL).
        data: JSON data, which depends on the kind.
        time: seconds since 1970.

    Example:
        def on_event(event: trainload.Event) -> None:
            if event.kind == "step":
                print(event.data["step"], event.data["loss"])
    """

    kind: str
    data: Mapping[str, Any]
    time: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", redacted_data(self.data))


def event_of(line: str | bytes) -> Event | None:
    """Parse a line of the journal; None for an incomplete line, whose writer was killed or had no
    disk space.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return Event(entry["kind"], entry["data"], entry["time"])


class Journal:
    """Writer of a journal.

    Lines are appended with a single write, so that those of several processes do not mix.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL

    def write(self, kind: str, **data: Any) -> None:
        """Append an event. `data` is JSON; NaN is allowed, so that a diverged loss is visible.

        Raises:
            StorageError: the disk is full, or the run's folder does not exist.
        """
        self.append([Event(kind, data, time.time())])

    def size(self) -> int:
        """Return its number of bytes; 0 if it cannot be read."""
        with suppress(OSError):
            return self._path.stat().st_size
        return 0

    def append(self, events: list[Event]) -> None:
        """Append events, and remove those that were written from the list.

        The errors are those of `write`.
        """
        lines = [
            json.dumps(
                {"kind": each.kind, "time": each.time, "data": dict(each.data)},
                separators=(",", ":"),
            )
            + "\n"
            for each in events
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
            hint = (
                "Free some disk space, then resume the run." if error.errno == errno.ENOSPC else ""
            )
            raise StorageError(
                f"the journal cannot be written: {error.strerror}", where=str(self._path), hint=hint
            ) from error


def _ends_whole(descriptor: int) -> bool:
    """Return True if the last line of a file is complete.

    It need not be if its writer was killed or had no disk space.
    """
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


class Follower:
    """Reader of a growing journal. It reads line by line, since a journal may be larger than the
    memory.

    Incomplete lines at the end, such as those of a worker that was killed, are ignored.

    Raises:
        StorageError: the journal exists and cannot be read.
    """

    def __init__(self, run_dir: Path, *, from_end: bool = False) -> None:
        self._path = run_dir / JOURNAL
        with reading("the journal", self._path):
            self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0

    def new(self) -> Iterator[Event]:
        """Yield the events since the last call.

        Raises StorageError if the journal cannot be read.
        """
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
    """Call `on_event` from a thread with the events that any process writes within the context.

    All of them have been passed on when the context ends, if the journal can be read.
    """
    follower = Follower(run_dir, from_end=True)
    ended = threading.Event()

    def tell() -> None:
        with suppress(StorageError):  # events that cannot be read now are read later
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
    """Return an iterator over all events of a run so far. The errors are those of `Follower`."""
    return Follower(run_dir).new()


def read_events(run_dir: Path) -> list[Event]:
    """Return all events of a run so far.

    Those of a million steps take 2.3 GiB of memory. The errors are those of `Follower`.
    """
    return list(stream_events(run_dir))


def losses(events: Iterable[Event]) -> list[float]:
    """Return the loss of every step, in order.

    If a step was repeated after a restart, its last loss counts.
    """
    by_step = {int(e.data["step"]): float(e.data["loss"]) for e in events if e.kind == "step"}
    return [by_step[s] for s in sorted(by_step)]


def last_word(error: BaseException) -> Event:
    """Return the last event of a run that ends with an error before its last step."""
    kind = "stopped" if isinstance(error, RunInterrupted | KeyboardInterrupt) else "failed"
    message = str(error) or (
        "ended at once, without a checkpoint"
        if isinstance(error, KeyboardInterrupt)
        else type(error).__name__
    )
    return Event(kind, {"error": type(error).__name__, "message": message}, time.time())
