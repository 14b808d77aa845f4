"""Times of tests: `--limit SECONDS` lists the slowest, and those above the limit that `make test`
may not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

MAY_EXCEED = ("tests/laws/test_law_1.py", "tests/laws/test_law_4.py")
"""Files whose tests may take longer: the wheel in fresh environments; whole runs killed and
resumed.

So may what is `ray` or `slow`.
"""
LISTED = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that a test took with its fixtures. exempt: the limit does not hold for it."""

    test: str
    seconds: float
    exempt: bool


def add_limit_option(parser: pytest.Parser) -> None:
    """Add `--limit`."""
    parser.addoption(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="list the slowest tests, and fail if one takes longer than this",
    )


def timings_of(reports: Iterable[pytest.TestReport]) -> list[Timing]:
    """Return the time of each test, the longest first.

    A fixture's time counts for the first test that uses it.
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
    """Return what `--limit` prints: the slowest tests and all above the limit, then how many of
    these are not exempt.
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
    """Print the slowest tests and those above the limit, where `--limit` is given; the session then
    fails of any that is not exempt.
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
