"""The reason why a run cannot go on, as a file: a worker writes it, later workers and the driver read it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import trainload.capture.errors as errors
from trainload.capture.errors import TrainloadError, WorkError
from trainload.launch.spec import replace_file
from trainload.packaging.canonical import canonical_json, parse_canonical

FAILURE_FILE = "failure.json"


def write_failure(run_dir: Path, error: TrainloadError) -> None:
    """Leaves the reason. Restarting would not help: our own errors are about the request, the data or the numbers.

    Where the disk is full there may be no room for it: then the workers are restarted as often as for any other failure.
    """
    fields = {
        "kind": type(error).__name__,
        "problem": error.problem,
        "where": error.where,
        "expected": error.expected,
        "got": error.got,
        "cure": error.cure,
    }
    with suppress(OSError):
        replace_file(run_dir / FAILURE_FILE, canonical_json(fields))


def read_failure(run_dir: Path) -> TrainloadError | None:
    """The reason that was left, as the exception that it was."""
    path = run_dir / FAILURE_FILE
    if not path.exists():
        return None
    fields = parse_canonical(path.read_bytes(), str(path))
    kind = getattr(errors, fields.pop("kind"), WorkError)
    problem = fields.pop("problem")
    error: TrainloadError = kind(problem, **fields)
    return error


def clear_failure(run_dir: Path) -> None:
    """Forgets the reason, before a new attempt."""
    (run_dir / FAILURE_FILE).unlink(missing_ok=True)
