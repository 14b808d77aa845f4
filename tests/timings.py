"""Durations of tests: `--limit SECONDS` lists the slowest, and fails if one exceeds the limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

MAY_EXCEED = ("tests/laws/test_law_1.py", "tests/laws/test_law_4.py")
"""Files whose tests may exceed the limit: they install wheels, or kill and resume whole runs.

Tests marked `ray` or `slow` may exceed it too.
"""
LISTED = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Duration of a test with its fixtures, in seconds. `exempt`: the limit does not apply."""

    test: str
    seconds: float
    exempt: bool


def add_limit_option(parser: pytest.Parser) -> None:
    """Add the option `--limit`."""
    parser.addoption(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="list the slowest tests, and fail if one takes longer than this",
    )


def timings_of(reports: Iterable[pytest.TestReport]) -> list[Timing]:
    """Return the duration of each test, longest first.

    A fixture's duration counts for the first test that uses it.
    """
    seconds: dict[str, float] = defaultdict(float)
    exempt: dict[str, bool] = {}
    for report in reports:
        seconds[report.nodeid] += report.duration
        exempt[report.nodeid] = (
            report.nodeid.startswith(MAY_EXCEED)
            or "ray" in report.keywords
            or "slow" in report.keywords
        )
    found = [Timing(test, total, exempt[test]) for test, total in seconds.items()]
    return sorted(found, key=lambda timing: -timing.seconds)


def lines_of(timings: Sequence[Timing], limit: float) -> list[str]:
    """Return the output of `--limit`.

    It lists the slowest tests and all that exceed the limit, then the number of these that are not
    exempt.
    """
    above = [timing for timing in timings if timing.seconds > limit]
    lines = []
    for timing in timings[: max(LISTED, len(above))]:
        note = (
            ""
            if timing.seconds <= limit
            else "  above the limit, exempt"
            if timing.exempt
            else "  ABOVE THE LIMIT"
        )
        lines.append(f"{timing.seconds:7.1f} s  {timing.test}{note}")
    total, wrong = (
        sum(timing.seconds for timing in timings),
        sum(not timing.exempt for timing in above),
    )
    return [
        *lines,
        f"{len(timings)} tests in {total:.0f} s of processes; {wrong} above {limit:g} s",
    ]


def report_timings(reporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests and those above the limit if `--limit` is given.

    The session fails if one of these is not exempt.
    """
    limit = reporter.config.getoption("limit")
    if limit is None:
        return
    timings = timings_of(
        report
        for group in reporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport)
    )
    reporter.section("test durations")
    for line in lines_of(timings, limit):
        reporter.write_line(line)
    if any(timing.seconds > limit and not timing.exempt for timing in timings):
        pytest.exit(f"tests take longer than {limit:g} s", returncode=1)
