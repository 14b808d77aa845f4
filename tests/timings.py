"""How long tests take: `--limit SECONDS` lists the slowest, and those above the limit that `make test` may not have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

MAY_EXCEED = ("tests/laws/test_law_1.py", "tests/laws/test_law_4.py")
"""Files whose tests may take longer: they install the wheel in fresh environments, and kill and resume whole runs. So may `ray` and `slow`."""
LISTED = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that a test took with its fixtures. exempt: the limit does not hold for it."""

    test: str
    seconds: float
    exempt: bool


def add_limit_option(parser: pytest.Parser) -> None:
    """Add `--limit`."""
    parser.addoption("--limit", type=float, metavar="SECONDS", help="list the slowest tests, and fail if one takes longer than this")


def timings_of(reports: Iterable[pytest.TestReport]) -> list[Timing]:
    """Return the time of each test, the longest first. A fixture's time counts for the first test that uses it."""
    seconds: dict[str, float] = defaultdict(float)
    exempt: dict[str, bool] = {}
    for report in reports:
        seconds[report.nodeid] += report.duration
        exempt[report.nodeid] = report.nodeid.startswith(MAY_EXCEED) or "ray" in report.keywords or "slow" in report.keywords
    found = [Timing(test, total, exempt[test]) for test, total in seconds.items()]
    return sorted(found, key=lambda timing: -timing.seconds)


def report_timings(reporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests and those above the limit, where `--limit` is given; the session then fails of any that is not exempt."""
    limit = reporter.config.getoption("limit")
    if limit is None:
        return
    reports = [report for group in reporter.stats.values() for report in group if isinstance(report, pytest.TestReport)]
    timings = timings_of(reports)
    above = [timing for timing in timings if timing.seconds > limit]
    reporter.section("test durations")
    for timing in timings[: max(LISTED, len(above))]:
        note = "" if timing.seconds <= limit else "  above the limit, exempt" if timing.exempt else "  ABOVE THE LIMIT"
        reporter.write_line(f"{timing.seconds:7.1f} s  {timing.test}{note}")
    wrong = sum(not timing.exempt for timing in above)
    reporter.write_line(
        f"{len(timings)} tests in {sum(timing.seconds for timing in timings):.0f} s of processes; {wrong} above {limit:g} s"
    )
    if wrong:
        pytest.exit(f"{wrong} tests take longer than {limit:g} s", returncode=1)
