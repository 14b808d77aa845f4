"""The driver of a run: one process at a time, which holds the lease in the run's folder.

driver/leases/00000003.json   the run's third driver; see `trainload.core.storage.lease`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from trainload.core.errors import StorageError
from trainload.core.logs import logged_suppress
from trainload.core.storage.lease import PLAIN, HeldLease, LeaseRecord, Leases, OtherLease
from trainload.launching.run.run_place import (
    LEASE_SECONDS,
    check_can_be_owned,
    place_name,
    record_files,
    url_of,
)
from trainload.launching.run.run_state import (
    FRESH_SECONDS,
    STATE_FILE,
    RunState,
    Summary,
    put_state,
    read_state,
    write_state,
)

_log = logging.getLogger(__name__)

FOLDER = "driver"
CheckDriver = Callable[[], None]
"""Raises LeaseLostError if another process drives the run now."""


class Records(Protocol):
    """Publisher of the records of a run; see `publication`."""

    def begin(self, check_driver: CheckDriver) -> None:
        """Begin to publish, as long as this process drives the run."""

    def forget(self) -> None:
        """Remove what was published: the run has not begun."""

    def close(self) -> None:
        """Publish what is left."""


def other_driver(run_dir: Path) -> str | None:
    """Return who drives a run, for people; None if nobody else does.

    Raises: StorageError: its folder cannot be read.
    """
    leases = _leases(run_dir)
    if leases.last() is None:
        return _driver_without_lease(run_dir)
    other = leases.other()
    return None if other is None else other.record.owner


def check_no_driver(run_dir: Path) -> None:
    """Check that nobody drives a run.

    Raises: StorageError: somebody does, or its folder cannot be read.
    """
    owner = other_driver(run_dir)
    if owner is not None:
        raise _driven_elsewhere_error(run_dir, owner)


@contextmanager
def driving(run_dir: Path, records: Records | None = None) -> Iterator[CheckDriver]:
    """Drive a run inside the block. If several processes try concurrently, exactly one does.

    What runs inside replaces the run's state; if it never does, the state is left as it was before.
    If the folder cannot be written now, no lease is taken: what runs inside waits for the storage.

    Args:
        run_dir: the run's folder, or a working copy.
        records: publishes the run's records while this process has the lease.

    Yields:
        A function that raises LeaseLostError if another process drives the run now.

    Raises:
        StorageError: another process drives the run; or the run's URL cannot be written, when the
            run begins or at its end.
    """
    lease = _claim_lease(run_dir)
    check = check_nothing if lease is None else lease.check
    before = read_state(run_dir)
    written = None
    with logged_suppress(_log, f"the state of {run_dir} was not written", OSError):
        summary = Summary() if before is None else before.summary
        written = write_state(
            run_dir,
            0,
            summary.model_copy(update={"phase": "waiting", "message": "", "error": ""}),
            {},
        )
    try:
        if records is not None:
            records.begin(check)
        yield check
    except BaseException:
        with logged_suppress(_log, f"records of {run_dir} were not published", StorageError):
            _end(run_dir, records, written, before)
        raise
    else:
        _end(run_dir, records, written, before)
    finally:
        if lease is not None:
            lease.close()


def _end(
    run_dir: Path, records: Records | None, written: RunState | None, before: RunState | None
) -> None:
    """Restore the state if it is still the one that `driving` wrote, and end the publication."""
    if written is not None and read_state(run_dir) == written:
        _restore_state(run_dir, before)
        if before is None and records is not None:
            with logged_suppress(_log, f"the state of {run_dir} was not removed", StorageError):
                records.forget()
    if records is not None:
        records.close()


def _claim_lease(run_dir: Path) -> HeldLease[LeaseRecord] | None:
    """Take the lease; None if the folder cannot be written.

    Raises: StorageError: another process holds it, or the run's URL cannot be reached or written.
    """
    leases = _leases(run_dir)
    if leases.last() is None and (owner := _driver_without_lease(run_dir)) is not None:
        raise _driven_elsewhere_error(run_dir, owner)
    try:
        if url_of(run_dir) is not None:
            check_can_be_owned(record_files(run_dir))
        lease = leases.take(FRESH_SECONDS)
        if isinstance(lease, OtherLease):
            raise _driven_elsewhere_error(run_dir, lease.record.owner)
        leases.forget_before(lease.id)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and url_of(run_dir) is None:
            return None
        raise
    return lease


def _driver_without_lease(run_dir: Path) -> str | None:
    """Return who drives a run that was begun before drivers had leases."""
    state = read_state(run_dir)
    return (
        f"process {state.pid} on {state.host}" if state is not None and state.of_another else None
    )


def _restore_state(run_dir: Path, before: RunState | None) -> None:
    with suppress(OSError):  # as if this process had been killed
        if before is None:
            (run_dir / STATE_FILE).unlink()
        else:
            put_state(run_dir, before)


def _leases(run_dir: Path) -> Leases[LeaseRecord]:
    hint = "Another process is driving the run: watch it with `trainload status`."
    return Leases(
        record_files(run_dir, LEASE_SECONDS),
        FOLDER,
        where=place_name(run_dir),
        kinds=PLAIN,
        hint=hint,
        regains=True,
    )


def check_nothing() -> None:
    """Stand in for the check of a lease that could not be taken."""


def _driven_elsewhere_error(run_dir: Path, owner: str) -> StorageError:
    hint = "Watch it with `trainload status`, or end it with `trainload stop`."
    return StorageError(
        "the run is already being driven",
        where=place_name(run_dir),
        got=f"its driver is {owner}",
        hint=hint,
    )
