"""Count the results on torch's databases for docs/measurements/coverage.md.

Run by `make coverage-suite`, or by `python -m tests.torch_samples.count`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.coverage import suite
from tests.coverage.table import TORCH_SAMPLES


class Outcomes:
    """A pytest plugin that records the result of each case."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the report of one phase of a test."""
        test = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.append(test)
        elif report.when == "call" and report.passed:
            self.passed[test.partition("[")[0]] += 1


def main() -> int:
    """Run the tests and write the page. Return the exit status: 0 if all cases passed."""
    found = Outcomes()
    pytest.main(
        ["-q", "-n", "2", "-p", "no:cacheprovider", str(Path(__file__).parent)], plugins=[found]
    )
    TORCH_SAMPLES.write_text(
        json.dumps(
            {"torch": torch.__version__, "passed": found.passed, "failed": sorted(found.failed)},
            indent=1,
        )
        + "\n"
    )
    suite.main(["--table"])
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
