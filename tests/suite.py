"""Runs the whole suite, as `make test` does: what needs a Ray cluster in one process, beside it all else in two.

    python -m tests.suite

Tests on a Ray cluster take turns, since they end each other's workers otherwise; they leave half of two cores idle, which the others use.
What the cluster's tests print is shown when both are done. Ends with 1 if a test fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = (
    "tests/laws/test_law_4.py",
    "tests/launch/test_bad_input.py",
    "tests/launch/test_extensions.py",
    "tests/launch/test_interrupt.py",
    "tests/launch/test_json.py",
    "tests/launch/test_kills.py",
    "tests/launch/test_several_graphs.py",
    "tests/launch/test_variants.py",
)
"""The files of tests that use a Ray cluster."""


def main() -> int:
    """Exit status: 0 where every test passes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started this in the background: tests send it
    pytest = [sys.executable, "-m", "pytest"]
    rest = [*pytest, "-n", "2", "--dist", "loadfile", *(f"--ignore={file}" for file in CLUSTER)]
    with tempfile.TemporaryFile() as told:
        running = [
            subprocess.Popen(rest, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}),
            subprocess.Popen([*pytest, *CLUSTER], cwd=ROOT, stdout=told, stderr=subprocess.STDOUT),
        ]
        try:
            statuses = [process.wait() for process in running]
        finally:
            for process in running:  # it was interrupted: so were they, by the same key
                process.wait()
            told.seek(0)
            print(told.read().decode(errors="replace"), flush=True)
    return int(statuses != [0, 0])


if __name__ == "__main__":
    sys.exit(main())
