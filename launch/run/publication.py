"""Publication of a run's records: its driver writes them into a working copy, and a thread brings
them to the URL of the run.

So nothing waits for an object store but what must: a checkpoint is published after the events
before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainload.core.errors import ConflictError, StorageError, TrainloadError
from trainload.core.logs import log_handled
from trainload.core.storage.interface import StoreFiles, send_file
from trainload.core.storage.numbered_parts import NumberedParts
from trainload.launching.run.contact import REQUESTS, Request
from trainload.launching.run.driver import CheckDriver, check_nothing
from trainload.launching.run.journal import JOURNAL, LOGS, Journal
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_place import files_of
from trainload.launching.run.run_state import STATE_FILE, STATE_SECONDS
from trainload.launching.run.working_copy import DATA, EVENTS, KEPT_FILE

_log = logging.getLogger(__name__)

_FILES_SECONDS = 60.0
"""Interval between two looks for other files, such as those of TensorBoard."""
LAST_SECONDS = 60.0
"""Time in which the last records of a run must be published."""


class Publication:
    """Brings the records in a folder to the URL of which it is a working copy.

    For any other folder everything is published as soon as it is written.

    Args:
        folder: folder of the run.
        leading: False to publish only the output of ranks of this machine.
    """

    def __init__(self, folder: Path, *, leading: bool = True) -> None:
        self._folder, self._leading = folder, leading
        self._files = files_of(folder)
        self._check_driver: CheckDriver = check_nothing
        self._journal: NumberedParts | None = None
        self._logs: dict[str, NumberedParts] = {}
        self._state = b""
        self._requests: set[Request] = set()
        self._sent: dict[str, tuple[int, int]] = {}
        self._looked_at = 0.0
        self._failing_since: float | None = None
        self._error: TrainloadError | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_publishing, name="records", daemon=True)

    def begin(self, check_driver: CheckDriver) -> None:
        """Begin to publish, if the folder is a working copy.

        Args:
            check_driver: raises LeaseLostError if another process drives the run; nothing is
                published then.
        """
        if self._files is None:
            return
        self._check_driver = check_driver
        if self._leading:
            self._journal = self._known_journal(self._files)
            self._requests = {each for each in REQUESTS if (self._folder / each.file).exists()}
            self._note_files()
        self._thread.start()

    def published(self) -> float:
        """Return the number of bytes of the journal that others can read; infinity if they can read
        whatever is written.
        """
        return float("inf") if self._journal is None else self._journal.size

    def wait(self, seconds: float) -> None:
        """Wait until all events so far are published, or for this time."""
        until, size = time.monotonic() + seconds, Journal(self._folder).size()
        while self.published() < size and not self._is_lost and time.monotonic() < until:
            if not self.publish() or self.published() < size:
                time.sleep(0.1)

    @property
    def failure(self) -> tuple[TrainloadError, float] | None:
        """The error because of which nothing is published now, and for how many seconds."""
        if self._error is None or self._failing_since is None:
            return None
        return self._error, time.monotonic() - self._failing_since

    def close(self) -> None:
        """Publish what is left, and end.

        Raises:
            StorageError: it cannot be published; the working copy is kept.
        """
        if self._files is None or self._over.is_set():
            return
        self._over.set()
        try:
            if self._thread.is_alive():
                self._thread.join()
            self._publish_last(self._files)
        except BaseException:
            (self._folder / KEPT_FILE).touch()
            raise

    def _publish_last(self, files: StoreFiles) -> None:
        until = time.monotonic() + LAST_SECONDS
        while not self.publish(last=True):
            if self._is_lost:
                return
            if time.monotonic() > until:
                raise StorageError(
                    "the last records of the run were not published",
                    where=files.url,
                    got=str(self._error),
                    hint=f"They are in {self._folder}.",
                ) from self._error
            time.sleep(STATE_SECONDS)

    def publish(self, *, last: bool = False) -> bool:
        """Publish what was written. Return True if that succeeded.

        Args:
            last: True to publish all files, however lately others were.
        """
        assert self._files is not None, "otherwise there is nothing to publish"
        with self._lock:
            try:
                self._publish(self._files, last=last)
            except (TrainloadError, OSError) as error:
                log_handled(_log, f"records were not published at {self._files.url}", error)
                self._failing_since = self._failing_since or time.monotonic()
                self._error = error if isinstance(error, TrainloadError) else _as_storage(error)
                return False
            self._failing_since = self._error = None
            return True

    @property
    def _is_lost(self) -> bool:
        """True if the run belongs to another process."""
        return isinstance(self._error, ConflictError)

    def send_results(self) -> None:
        """Send what was written into the folder after the run.

        Raises:
            StorageError: it cannot be sent.
        """
        if self._files is not None:
            self._send_files(self._files)

    def _keep_publishing(self) -> None:
        while not self._over.wait(STATE_SECONDS):
            if not self.publish() and self._is_lost:
                return

    def _publish(self, files: StoreFiles, *, last: bool) -> None:
        self._check_driver()
        # before the events that follow it, which may be the last ones
        state = self._state_now()
        if self._journal is not None:
            self._journal.publish()
        for path in (self._folder / LOGS).glob("rank-*.log"):
            if path.stem not in self._logs:
                parts = NumberedParts(files, f"{LOGS}/{path.stem}", path)
                parts.skip()
                self._logs[path.stem] = parts
            self._logs[path.stem].publish()
        if not self._leading:
            self._pass_stop(files)
            return
        if state != self._state:
            files.replace(STATE_FILE, state) if state else files.delete(STATE_FILE)
            self._state = state
        self._pass_requests(files)
        if last or time.monotonic() - self._looked_at > _FILES_SECONDS:
            self._looked_at = time.monotonic()
            self._send_files(files)

    def _state_now(self) -> bytes:
        path = self._folder / STATE_FILE
        return path.read_bytes() if path.exists() else b""

    def _pass_requests(self, files: StoreFiles) -> None:
        """Make the requests here that others have made at the URL, and remove fulfilled ones."""
        names = files.names("")
        for each in REQUESTS:
            path = self._folder / each.file
            if each in self._requests and not path.exists():
                files.delete(each.file)
                self._requests.discard(each)
            elif each.file in names and each not in self._requests:
                path.touch()
                self._requests.add(each)

    def _pass_stop(self, files: StoreFiles) -> None:
        """Pass on to the driver that this process was asked to stop."""
        if Request.STOP not in self._requests and (self._folder / Request.STOP.file).exists():
            files.replace(Request.STOP.file, b"")
            self._requests.add(Request.STOP)

    def _known_journal(self, files: StoreFiles) -> NumberedParts:
        """Return the parts of the journal, which a resumed run continues."""
        journal = NumberedParts(files, EVENTS, self._folder / JOURNAL)
        journal.fetch()
        return journal

    def _note_files(self) -> None:
        """Note the files that were fetched, so that they are sent only if they change."""
        self._sent = {path: _mark(self._folder / path) for path in self._other_files()}

    def _send_files(self, files: StoreFiles) -> None:
        for path in self._other_files():
            local = self._folder / path
            mark = _mark(local)
            if self._sent.get(path) != mark:
                send_file(files, path, local)
                self._sent[path] = mark

    def _other_files(self) -> list[str]:
        """Return the files that are sent whole: results, and those of sinks."""
        own = {JOURNAL, STATE_FILE, RUN_FILE, *(each.file for each in REQUESTS)}
        found = []
        for path in self._folder.rglob("*"):
            inner = path.relative_to(self._folder)
            is_own = inner.parts[0] in (LOGS, DATA) or str(inner) in own
            if path.is_file() and not is_own and not inner.name.startswith("."):
                found.append(str(inner))
        return sorted(found)


@contextmanager
def publishing_output(folder: Path) -> Iterator[Publication]:
    """Publish the output of this machine's ranks inside the block, where another machine drives
    the run.
    """
    publication = Publication(folder, leading=False)
    publication.begin(check_nothing)
    try:
        yield publication
    finally:
        publication.close()


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _as_storage(error: OSError) -> StorageError:
    return StorageError(f"the working copy of the run cannot be read: {error}")
