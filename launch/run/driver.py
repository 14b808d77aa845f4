"""Who drives a run: one process at a time, which says so in the run's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trainload.core.errors import StorageError
from trainload.launching.run.run_state import STATE_FILE, RunState, Summary, put_state, read_state, write_state

LOCK_FILE = "driver.lock"
"""Held by whoever looks whether a run has a driver, and becomes it."""
_LOCK_SECONDS = 10.0


def check_no_driver(run_dir: Path) -> RunState | None:
    """Check that no driver owns a run. Return the state that its last driver wrote, if any. Raises: StorageError with the driver's name."""
    state = read_state(run_dir)
    if state is not None and state.of_another:
        raise _going_on(run_dir, f"its driver is process {state.pid} on {state.host}")
    return state


@contextmanager
def driving(run_dir: Path) -> Iterator[None]:
    """Within it this process is a run's driver: of several that ask at the same moment, one is.

    What does the run replaces the state from then on; where it never came to that, it is left as it was before. Where storage takes
    nothing now, nothing is said: who drives the run waits for it.

    Raises:
        StorageError: another process is.
    """
    before, said = _claim(run_dir)
    try:
        yield
    finally:
        if said is not None and read_state(run_dir) == said:
            with suppress(OSError):  # as if this process had been killed
                if before is None:
                    (run_dir / STATE_FILE).unlink()
                else:
                    put_state(run_dir, before)


def _claim(run_dir: Path) -> tuple[RunState | None, RunState | None]:
    """Says in a run's state that this process drives it. Returns: what was said there before, and what is now. Raises: as `driving`."""
    try:
        with FileLock(run_dir / LOCK_FILE, timeout=_LOCK_SECONDS):
            before = check_no_driver(run_dir)
            summary = Summary() if before is None else before.summary
            return before, write_state(run_dir, 0, summary.model_copy(update={"phase": "waiting", "message": "", "error": ""}), {})
    except Timeout:
        raise _going_on(run_dir, f"another process has held {LOCK_FILE} for {_LOCK_SECONDS:.0f} s") from None
    except OSError:
        return None, None


def _going_on(run_dir: Path, who: str) -> StorageError:
    cure = "Watch it with `trainload status`, or end it with `trainload stop`."
    return StorageError("the run is going on", where=str(run_dir), got=who, cure=cure)
