"""Working copies of a run at a URL; see `run_place`.

URL/run.json               URL/state.json       URL/stop, URL/checkpoint-now, URL/profile-now
URL/events/00000001.jsonl  the journal, in parts (see `core.storage.numbered_parts`)
URL/logs/rank-00000/00000001.log  the output of a rank, likewise
URL/driver/                the lease of the driver
URL/data/, URL/checkpoints/  are read and written there, and not copied
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock

from trainload.core.atomic import create_file, replace_file
from trainload.core.credentials import check_no_credentials
from trainload.core.errors import StorageError
from trainload.core.paths import check_name
from trainload.core.storage.interface import StoreFiles
from trainload.core.storage.numbered_parts import NumberedParts
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import Where, is_url, local_path
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.run.contact import REQUEST_FILES, REQUESTS, Request
from trainload.launching.run.copy_use import LOCKS, driven, is_driven, is_used, is_used_here, used
from trainload.launching.run.driver import other_driver
from trainload.launching.run.journal import JOURNAL, LOGS, log_name
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_place import PLACE_FILE, SECONDS, files_of, place_name, url_of
from trainload.launching.run.run_state import STATE_FILE, RunState, parse_state, read_state

EVENTS = "events"
DATA = "data"
KEPT_FILE = ".unpublished"
"""Marks a working copy that may have records which are not at its URL; see `publication`."""
SINK_FILE = "mlflow-run"
"""A file by which a resumed run finds its run in MLflow."""
SINK_PREFIX = "sink-"
"""Beginning of the names of files of sinks that a resumed run needs."""
_REQUESTS = frozenset(REQUEST_FILES)
_COPIED = frozenset({RUN_FILE, STATE_FILE, SINK_FILE}) | _REQUESTS
_MOST_BYTES = 2**28
_LOCK_SECONDS = 60.0


@contextmanager
def working_copy(run_dir: Where) -> Iterator[Path]:
    """Yield the folder of a run: an absolute path, or for a URL a working copy, without files.

    A new copy is removed at the end unless it has records that could not be published. A copy that
    another process made, which is the supervisor of this one, is emptied, but for its place.

    Raises:
        StorageError: the URL contains credentials or does not name a folder, the cache cannot be
            written, or the folder is a copy in which another process drives the run, or which has
            records that could not be published.
    """
    if is_url(run_dir):
        with _new_copy(str(run_dir).rstrip("/")) as folder:
            yield folder
        return
    folder = local_path(run_dir).absolute()
    if url_of(folder) is None or is_used_here(folder):
        yield folder
        return
    with used(folder), driven(folder):
        _check_not_kept(folder)
        _empty(folder)
        yield folder


@contextmanager
def _new_copy(url: str) -> Iterator[Path]:
    _check_url(url)
    parent = copies_folder()
    with ExitStack() as held:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with FileLock(parent.with_suffix(".lock"), timeout=_LOCK_SECONDS):
                _remove_orphans(parent)
                outer = parent / f"run-{secrets.token_hex(8)}"
                folder = outer / url.rpartition("/")[2]
                outer.mkdir(mode=0o700)
                folder.mkdir()
                create_file(folder / PLACE_FILE, url.encode())
                held.enter_context(used(folder))
        except OSError as error:
            raise StorageError(
                f"there is no place for a working copy of the run: {error.strerror or error}",
                where=str(parent),
                hint="Free some disk space, or choose another cache with TRAINLOAD_CACHE_DIR.",
            ) from error
        try:
            yield folder
        finally:
            if not (folder / KEPT_FILE).exists():
                shutil.rmtree(outer, ignore_errors=True)


def copies_folder() -> Path:
    """Return the folder of this machine's working copies."""
    return default_cache_dir() / "runs"


def kept_copies(url: str) -> list[Path]:
    """Return the working copies of a run on this machine that may have records which are not at its
    URL, and in which nobody drives.
    """
    places = sorted(copies_folder().glob(f"run-*/*/{KEPT_FILE}"))
    copies = [each.parent for each in places if url_of(each.parent) == url]
    return [each for each in copies if not is_driven(each)]


def remove_copy(folder: Path) -> None:
    """Remove a working copy of this machine."""
    shutil.rmtree(folder.parent, ignore_errors=True)


def _check_url(url: str) -> None:
    check_no_credentials(url)
    place = url.partition("://")[2]
    parts = place.split("/")
    if len(parts) < 2 or not {"", ".", ".."}.isdisjoint(parts) or {"#", "?"} & set(place):
        raise StorageError(
            "a run cannot be there",
            where=url,
            expected="PROTOCOL://BUCKET/FOLDER, without ., .., # and ?",
            hint="Name a folder in the bucket, for example s3://bucket/runs/first.",
        )
    check_name(Path(parts[-1]))


def _check_not_kept(folder: Path) -> None:
    if (folder / KEPT_FILE).exists():
        raise StorageError(
            "this folder has records of a run that were not published",
            where=str(folder),
            got=f"a copy of {url_of(folder)}",
            hint="Name the run by its URL; remove the folder when you do not need it.",
        )


def _remove_orphans(parent: Path) -> None:
    """Remove the copies that no process uses, unless they may have unpublished records."""
    for outer in parent.glob("run-*"):
        with suppress(OSError):  # such as one of another user
            copies = [each.parent for each in outer.glob(f"*/{PLACE_FILE}")]
            if not any((each / KEPT_FILE).exists() or is_used(each) for each in copies):
                shutil.rmtree(outer)


def place_to_read(run_dir: Where) -> Where:
    """Return where the records of a run are read: its URL instead of a working copy, unless the
    copy has records that could not be published.
    """
    if is_url(run_dir):
        return run_dir
    folder = local_path(run_dir)
    url = url_of(folder)
    if url is None or is_used_here(folder.absolute()):
        return folder
    return folder if (folder / KEPT_FILE).exists() and not is_driven(folder) else url


@contextmanager
def viewed(run_dir: Where, *, journal: bool = True) -> Iterator[RunFiles]:
    """Yield a view of a run, for those who read it.

    Args:
        run_dir: a folder, or a URL.
        journal: False if its events are not wanted.

    Raises:
        StorageError: the URL cannot be reached.
    """
    place = place_to_read(run_dir)
    is_here = not is_url(place)
    with nullcontext(local_path(place).absolute()) if is_here else working_copy(place) as folder:
        view = RunFiles(folder, journal=journal)
        view.update()
        yield view


class RunFiles:
    """The files of a run, as they were when they were last read from its URL.

    Args:
        folder: the run's folder, or a working copy that nobody drives.
        journal: False if its events are not wanted.
        rank: the rank whose output is wanted; None if that of no rank is.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: Path, *, journal: bool = True, rank: int | None = None) -> None:
        self.folder = folder
        # what was not published is only there
        self._files = None if (folder / KEPT_FILE).exists() else files_of(folder)
        self._has_journal, self._rank = journal, rank
        self._parts: dict[str, NumberedParts] = {}

    @property
    def is_at_url(self) -> bool:
        """True if the run is at a URL."""
        return self._files is not None

    def update(self) -> None:
        """Read what has changed. A folder needs nothing.

        Raises:
            StorageError: the URL cannot be reached.
        """
        if self._files is None:
            return
        self._copy_files(self._files)
        if self._has_journal:
            self._fetch_journal(self._files)
        if self._rank is not None:
            path = self.folder / LOGS / log_name(self._rank)
            path.parent.mkdir(exist_ok=True)
            self._fetch(self._files, f"{LOGS}/{path.stem}", path)

    def ranks_with_output(self) -> list[int]:
        """Return the ranks that have printed something.

        Raises:
            StorageError: the URL cannot be reached.
        """
        paths = (self.folder / LOGS).glob("rank-*.log")
        names = [path.stem for path in paths] if self._files is None else self._files.names(LOGS)
        return sorted(int(name.rpartition("-")[2]) for name in names)

    def _fetch_journal(self, files: StoreFiles) -> None:
        journal = self.folder / JOURNAL
        if self._fetch(files, EVENTS, journal).size == 0:
            # of a run that was copied from a folder, and is not continued yet
            size = files.size(JOURNAL) or 0
            with journal.open("wb") as file:
                file.writelines(files.receive(JOURNAL, size) if size else ())

    def _copy_files(self, files: StoreFiles) -> None:
        there = files.names("")
        names = {each for each in there if each in _COPIED or each.startswith(SINK_PREFIX)}
        for name in _REQUESTS - names:
            (self.folder / name).unlink(missing_ok=True)
        for name in sorted(names):
            content = files.read(name, _MOST_BYTES)
            if content is not None:  # or it was removed meanwhile
                replace_file(self.folder / name, content, durable=False)
        _order_requests(self.folder)

    def _fetch(self, files: StoreFiles, place: str, path: Path) -> NumberedParts:
        if place not in self._parts:
            self._parts[place] = NumberedParts(files, place, path)
        self._parts[place].fetch()
        return self._parts[place]


def _order_requests(folder: Path) -> None:
    """Make a request newer than the run's state if it was made after that was written."""
    state = read_state(folder)
    if state is None:
        return
    written = (folder / STATE_FILE).stat().st_mtime_ns
    for each in REQUESTS:
        path = folder / each.file
        if path.exists():
            seen = path.read_text(encoding="utf-8")
            age = 10**9 if seen == repr(state.time) else -(10**9)
            os.utime(path, ns=(written + age, written + age))


def runs_at(url: str) -> Iterator[tuple[str, RunState | None]]:
    """Yield the URL and the last state of each run directly below a URL.

    Raises:
        StorageError: it cannot be reached.
    """
    files = open_bounded(url, SECONDS)
    for name in files.names(""):
        where = f"{files.url}/{name}"
        if has_run(where):
            yield where, state_at(where)


def has_run(run_dir: Where) -> bool:
    """Return True if there is a run in a folder or at a URL.

    Raises:
        StorageError: it cannot be reached.
    """
    files = _files_at(run_dir)
    if files is None:
        return (local_path(run_dir) / RUN_FILE).exists()
    return files.size(RUN_FILE) is not None


def state_at(run_dir: Where) -> RunState | None:
    """Return the last state of the run in a folder or at a URL; None if there is none.

    Raises:
        StorageError: the URL cannot be reached.
    """
    files = _files_at(run_dir)
    if files is None:
        return read_state(local_path(run_dir))
    content = files.read(STATE_FILE, _MOST_BYTES)
    return None if content is None else parse_state(content, f"{files.url}/{STATE_FILE}")


def request(run_dir: Where, wanted: Request) -> None:
    """Make a request to the driver of a run, which may be on another machine.

    Args:
        run_dir: its folder, a working copy, or its URL.
        wanted: the request.

    Raises:
        OSError, StorageError: it cannot be written.
    """
    files = _files_at(run_dir)
    if files is None:
        (local_path(run_dir) / wanted.file).touch()
        return
    state = state_at(run_dir)
    files.replace(wanted.file, repr(0.0 if state is None else state.time).encode())


def forget_requests(folder: Path) -> None:
    """Remove the requests at the URL of a new run, which were made to an earlier one.

    Raises:
        StorageError: they cannot be removed.
    """
    files = files_of(folder)
    if files is not None:
        for name in REQUEST_FILES:
            files.delete(name)


def _files_at(run_dir: Where) -> StoreFiles | None:
    """Return the files of a run at a URL, named by the URL or a working copy; None for a folder."""
    if is_url(run_dir):
        return open_bounded(str(run_dir), SECONDS)
    return files_of(local_path(run_dir))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in LOCKS | {PLACE_FILE}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def reported_state(files: RunFiles) -> RunState:
    """Return the last state that a run's driver wrote, having read what is new at its URL.

    Raises:
        StorageError: there is no run, or it has not reported anything yet.
    """
    files.update()
    place = place_name(files.folder)
    if not (files.folder / RUN_FILE).exists():
        raise StorageError(
            "there is no such run",
            where=place,
            hint="Pass what was passed to `trainload launch --run-dir`.",
        )
    state = read_state(files.folder)
    if state is not None and state.phase == "lost":  # or it has ended since it was read
        files.update()
        state = read_state(files.folder)
        is_elsewhere = files.is_at_url and other_driver(files.folder) is not None
        if state is not None and state.phase == "lost" and is_elsewhere:
            # the driver's clock differs from this machine's
            state = state.model_copy(update={"time": time.time()})
    if state is None:
        raise StorageError(
            "the run has not reported anything yet",
            where=place,
            hint="Try again after it has started.",
        )
    return state
