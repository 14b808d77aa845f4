"""Publication of a run's records: its driver writes them into a working copy, and threads bring
them to the URL of the run.

So nothing waits for an object store but what must: a checkpoint is published after the events
before it. Journal, state, output of ranks and other files are published separately, so that none of
them waits for another.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainload.core.atomic import replace_file, temporary_beside
from trainload.core.errors import ConflictError, StorageError, TrainloadError
from trainload.core.logs import log_handled
from trainload.core.storage.interface import StoreFiles, send_file
from trainload.core.storage.lease import LeaseLostError
from trainload.core.storage.numbered_parts import NumberedParts
from trainload.launching.run.contact import REQUEST_FILES, Request
from trainload.launching.run.copy_use import driven
from trainload.launching.run.driver import CheckDriver, check_nothing
from trainload.launching.run.journal import JOURNAL, LOGS, Journal
from trainload.launching.run.run_directory import RUN_FILE, resume_command
from trainload.launching.run.run_place import files_of, url_of
from trainload.launching.run.run_state import STATE_FILE, STATE_SECONDS, parse_state, read_state
from trainload.launching.run.working_copy import DATA, EVENTS, KEPT_FILE, RunFiles

_log = logging.getLogger(__name__)

_FILES_SECONDS = 60.0
"""Interval between two looks for other files, such as those of TensorBoard."""
LAST_SECONDS = 60.0
"""Time in which the last records of a run must be published."""
_MOST_REQUEST_BYTES = 2**20
_AT_ONCE = 8
"""Number of logs that are published concurrently."""


class Publication:
    """Brings the records in a folder to the URL of which it is a working copy.

    For any other folder everything is published as soon as it is written.

    Args:
        folder: folder of the run.
        leading: False to publish only the output of ranks of this machine.
        patience: seconds for which publication may fail before the run ends.
        is_left: True for records that a driver which was killed has left in a working copy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        leading: bool = True,
        patience: float = float("inf"),
        is_left: bool = False,
    ) -> None:
        self._folder, self._leading, self._patience = folder, leading, patience
        self._is_left = is_left
        self._files = files_of(folder)
        self._check_driver: CheckDriver = check_nothing
        self._journal: NumberedParts | None = None
        self._logs: dict[str, NumberedParts] = {}
        self._bases: dict[str, int] = {}
        self._state = b""
        self._requests: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}
        self._has_begun = self._has_warned = False
        self._fence = 0  # bytes of the journal up to this driver's event
        self._held = ExitStack()
        self._over = threading.Event()
        self._tasks: dict[str, _Repeated] = {}

    def begin(self, check_driver: CheckDriver) -> None:
        """Begin to publish, if the folder is a working copy.

        Args:
            check_driver: raises LeaseLostError if another process drives the run; nothing is
                published then.

        Raises:
            StorageError: the URL cannot be read or written, or another process uses the folder.
            LeaseLostError: another process drives the run.
            ConflictError: the records were left, and another driver has continued the run.
        """
        if self._files is None:
            return
        self._check_driver = check_driver
        if self._leading:
            self._held.enter_context(driven(self._folder))
            if self._is_left:
                self._find_unpublished(self._files)
            else:
                self._journal = self._fenced_journal(self._files)
                self.note_files()
            self._requests = {name for name in REQUEST_FILES if (self._folder / name).exists()}
            self._note_bases()
        self._begin_tasks(self._files)
        self._has_begun = True

    def _find_unpublished(self, files: StoreFiles) -> None:
        bases = json.loads((self._folder / KEPT_FILE).read_bytes() or b"{}")
        self._journal = NumberedParts(files, EVENTS, self._folder / JOURNAL)
        if (self._folder / JOURNAL).exists() and not self._journal.match(0):
            raise ConflictError(
                "another driver has continued the run",
                where=files.url,
                got=f"events that are not in {self._folder}",
            )
        for name, base in bases.items():
            path = self._folder / LOGS / f"{name}.log"
            if path.exists():
                self._logs[name] = _new_log(files, path)
                self._logs[name].match(base)
        self._bases = bases

    def _begin_tasks(self, files: StoreFiles) -> None:
        def repeated(publish: Callable[[StoreFiles], None], seconds: float) -> _Repeated:
            return _Repeated(lambda: publish(files), seconds, self._over)

        if self._leading:
            self._tasks["journal"] = repeated(self._publish_journal, STATE_SECONDS)
        self._tasks["logs"] = repeated(self._publish_logs, STATE_SECONDS)
        if self._leading:
            self._tasks["files"] = repeated(self._publish_files, _FILES_SECONDS)
            # at the end it is published after the events, since it says that they are all
            self._tasks["state"] = repeated(self._publish_state, STATE_SECONDS)

    def published(self) -> float:
        """Return the number of bytes of the journal that others can read; infinity if they can read
        whatever is written.
        """
        return float("inf") if self._journal is None else self._journal.size

    def wait(self) -> None:
        """Wait until all events so far are published, or for the run's patience."""
        until, size = time.monotonic() + self._patience, Journal(self._folder).size()
        while self.published() < size and not self._is_lost and time.monotonic() < until:
            if not self._tasks["journal"].once() or self.published() < size:
                time.sleep(0.1)

    def check(self, warn: Callable[[str], None]) -> None:
        """Warn once when records cannot be published.

        Raises:
            StorageError: they cannot be for longer than the run's patience. Files of sinks are not
                worth that.
        """
        failing = [
            (each.failing_seconds, name, each.error)
            for name, each in self._tasks.items()
            if each.error is not None and not isinstance(each.error, LeaseLostError)
        ]
        if not failing:
            self._has_warned = False
            return
        seconds, name, error = max(failing, key=lambda each: (each[1] != "files", each[0]))
        if seconds > self._patience and name != "files":
            raise StorageError(
                f"the run's records cannot be published: {error.problem}",
                where=error.where,
                expected=f"storage that responds within {self._patience:g} s",
                got=error.got,
                hint=(
                    f"When it can be written again, continue with: {resume_command(self._folder)}"
                ),
            ) from error
        if not self._has_warned:
            self._has_warned = True
            warn(f"{error} Records are kept on this machine and published when possible.")

    def forget(self) -> None:
        """Remove the state from the URL, and this driver's event unless others follow it: the run
        has not begun.

        Raises:
            StorageError: it cannot be removed.
        """
        if self._files is None or self._is_left or not self._has_begun:
            return
        self._over.set()
        for task in self._tasks.values():
            task.end()
        self._files.delete(STATE_FILE)
        if self._journal is not None and Journal(self._folder).size() == self._fence:
            self._journal.remove_last()

    def close(self) -> None:
        """Publish what is left, and end.

        Raises:
            StorageError: it cannot be published; the working copy is kept.
        """
        if self._files is None:
            return
        self._over.set()
        with self._held:
            for task in self._tasks.values():
                task.end()
            if self._has_begun:
                self._publish_last(self._files)
                (self._folder / KEPT_FILE).unlink(missing_ok=True)

    def _publish_last(self, files: StoreFiles) -> None:
        until = time.monotonic() + LAST_SECONDS
        for task in self._tasks.values():
            while not task.once():
                if self._is_lost:
                    return
                if time.monotonic() > until:
                    raise StorageError(
                        "the last records of the run were not published",
                        where=files.url,
                        got=str(task.error),
                        hint=(
                            f"They are in {self._folder}, and are published when the run is resumed"
                            " on this machine."
                        ),
                    ) from task.error
                time.sleep(STATE_SECONDS)

    @property
    def _is_lost(self) -> bool:
        """True if the run belongs to another process."""
        return any(isinstance(each.error, LeaseLostError) for each in self._tasks.values())

    def note_files(self) -> None:
        """Note the files that are at the URL already; they are sent again only if they change."""
        self._sent = {path: _mark(self._folder / path) for path in self._other_files()}

    def send_results(self) -> None:
        """Send what was written into the folder after the run.

        Raises:
            StorageError: it cannot be sent.
        """
        if self._files is not None:
            self._send_files(self._files)

    def _fenced_journal(self, files: StoreFiles) -> NumberedParts:
        """Return the journal at the URL, continued with an event of this driver.

        When that is there, an earlier driver can add nothing more: its next part exists.
        """
        path = self._folder / JOURNAL
        journal = NumberedParts(files, EVENTS, path)
        while True:
            journal.fetch()
            self._check_driver()
            Journal(self._folder).write("driver", host=socket.gethostname(), process=os.getpid())
            try:
                journal.publish()
            except ConflictError:  # a part that the earlier driver had sent
                os.truncate(path, journal.size)
            else:
                self._fence = journal.size
                return journal

    def _publish_journal(self, files: StoreFiles) -> None:
        self._check_driver()
        if self._journal is not None:
            self._journal.publish(is_whole=self._over.is_set())

    def _publish_logs(self, files: StoreFiles) -> None:
        self._check_driver()
        found = sorted((self._folder / LOGS).glob("rank-*.log"))
        new = [path for path in found if path.stem not in self._logs]
        for path in new:
            log = _new_log(files, path)
            log.skip()
            self._logs[path.stem] = log
        if new and self._leading:
            self._note_bases()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            publish = [
                pool.submit(each.publish, is_whole=self._over.is_set())
                for each in self._logs.values()
            ]
            for each in publish:
                each.result()
        if not self._leading:
            self._pass_stop(files)

    def _note_bases(self) -> None:
        """Mark the copy as one with records that may not be published, and note after which parts
        its logs begin.
        """
        new = {name: log.last for name, log in self._logs.items() if name not in self._bases}
        self._bases.update(new)
        replace_file(self._folder / KEPT_FILE, json.dumps(self._bases).encode(), durable=False)

    def _publish_state(self, files: StoreFiles) -> None:
        self._check_driver()
        path = self._folder / STATE_FILE
        content = path.read_bytes() if path.exists() else b""
        # a final state says that there are no further events, so it is published after them
        state = parse_state(content, str(path)) if content else None
        if state is not None and (not state.over or self._over.is_set()) and content != self._state:
            files.replace(STATE_FILE, content)
            self._state = content
        self._pass_requests(files)

    def _pass_requests(self, files: StoreFiles) -> None:
        """Make the requests here that others have made at the URL, and remove fulfilled ones."""
        names = files.names("")
        for name in REQUEST_FILES:
            path = self._folder / name
            if name in self._requests and not path.exists():
                files.delete(name)
                self._requests.discard(name)
            elif name in names and name not in self._requests:
                content = files.read(name, _MOST_REQUEST_BYTES)
                if content is not None:  # or it was removed meanwhile
                    replace_file(path, content, durable=False)
                    self._requests.add(name)

    def _pass_stop(self, files: StoreFiles) -> None:
        """Pass on to the driver that this process was asked to stop."""
        name = Request.STOP.file
        if name not in self._requests and (self._folder / name).exists():
            files.replace(name, b"")
            self._requests.add(name)

    def _publish_files(self, files: StoreFiles) -> None:
        self._check_driver()
        for each in (self._journal, *self._logs.values()):
            if each is not None:
                each.merge()
        self._send_files(files)

    def _send_files(self, files: StoreFiles) -> None:
        for path in self._other_files():
            local = self._folder / path
            mark = _mark(local)
            if self._sent.get(path) != mark:
                with _snapshot(local) as still:
                    send_file(files, path, still)
                self._sent[path] = mark

    def _other_files(self) -> list[str]:
        """Return the files that are sent whole: results, and those of sinks."""
        own = {JOURNAL, STATE_FILE, RUN_FILE, *REQUEST_FILES}
        found = []
        for path in self._folder.rglob("*"):
            inner = path.relative_to(self._folder)
            is_own = inner.parts[0] in (LOGS, DATA) or str(inner) in own
            if path.is_file() and not is_own and not inner.name.startswith("."):
                found.append(str(inner))
        return sorted(found)


class _Repeated:
    """Something that is published repeatedly, by a thread.

    Args:
        publish: publishes it.
        seconds: interval.
        over: set when the thread is to end.

    Attributes:
        error: why it could not be published when that was last tried; None if it could.
    """

    def __init__(self, publish: Callable[[], None], seconds: float, over: threading.Event) -> None:
        self._publish, self._seconds, self._over = publish, seconds, over
        self.error: TrainloadError | None = None
        self._failing_since = 0.0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, name="records", daemon=True)
        self._thread.start()

    @property
    def failing_seconds(self) -> float:
        """Seconds since the first of the attempts that have failed; 0 if the last one has not."""
        return 0.0 if self.error is None else time.monotonic() - self._failing_since

    def once(self) -> bool:
        """Publish what was written. Return True if that succeeded."""
        with self._lock:
            began = time.monotonic()
            try:
                self._publish()
            except (TrainloadError, OSError) as error:
                log_handled(_log, "records were not published", error)
                if self.error is None:
                    self._failing_since = began
                self.error = error if isinstance(error, TrainloadError) else _as_storage(error)
                return False
            self.error = None
            return True

    def end(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _repeat(self) -> None:
        while not self._over.wait(self._seconds if self.error is None else STATE_SECONDS):
            if not self.once() and isinstance(self.error, LeaseLostError):
                return


def _new_log(files: StoreFiles, path: Path) -> NumberedParts:
    return NumberedParts(files, f"{LOGS}/{path.stem}", path, is_shared=True)


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


def await_end(folder: Path) -> None:
    """Wait for the last records of a run that another machine drives, and read them.

    Args:
        folder: a working copy. Nothing is done in any other folder, where they are.

    Raises:
        StorageError: they cannot be read, or there are none for too long.
    """
    files = RunFiles(folder)
    if not files.is_at_url:
        return
    until = time.monotonic() + LAST_SECONDS
    while True:
        files.update()
        state = read_state(folder)
        if state is not None and state.over:
            return
        if time.monotonic() > until:
            raise StorageError(
                "the driver of the run has not written its last records",
                where=str(url_of(folder)),
                hint="See `trainload status`.",
            )
        time.sleep(STATE_SECONDS)


@contextmanager
def _snapshot(path: Path) -> Iterator[Path]:
    """Yield a copy of a file, which does not change while it is sent, unlike that of a sink."""
    still = temporary_beside(path)
    try:
        shutil.copyfile(path, still)
        yield still
    finally:
        still.unlink(missing_ok=True)


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _as_storage(error: OSError) -> StorageError:
    return StorageError(f"the working copy of the run cannot be read: {error}")
