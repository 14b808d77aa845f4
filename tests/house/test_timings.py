"""`--limit` lists tests that take too long."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.timings import lines_of, timings_of


def report(
    test: str, seconds: float, *marks: str, when: Literal["setup", "call", "teardown"] = "call"
) -> pytest.TestReport:
    keywords: dict[str, Literal[1]] = dict.fromkeys(marks, 1)
    return pytest.TestReport(
        test, (test, 0, test), keywords, "passed", None, when, duration=seconds
    )


def test_a_test_above_the_limit_is_named() -> None:
    lines = lines_of(timings_of([report("a", 1.0), report("b", 3.0)]), 2.0)
    assert lines == [
        "    3.0 s  b  ABOVE THE LIMIT",
        "    1.0 s  a",
        "2 tests in 4 s of processes; 1 above 2 s",
    ]


@pytest.mark.parametrize(
    ("test", "marks"), [("tests/launch/a.py::b", ["ray"]), ("tests/laws/test_law_4.py::b", [])]
)
def test_what_is_on_ray_and_some_laws_may_take_longer(test: str, marks: list[str]) -> None:
    lines = lines_of(timings_of([report(test, 3.0, *marks)]), 2.0)
    assert lines == [
        f"    3.0 s  {test}  above the limit, exempt",
        "1 tests in 3 s of processes; 0 above 2 s",
    ]


def test_the_ten_slowest_are_listed() -> None:
    lines = lines_of(timings_of([report(str(n), float(n)) for n in range(20)]), 100.0)
    assert [line.split()[-1] for line in lines[:-1]] == [str(n) for n in range(19, 9, -1)]


def test_a_fixtures_time_is_its_first_tests() -> None:
    phases: list[tuple[Literal["setup", "call", "teardown"], float]]
    phases = [("setup", 2.0), ("call", 1.0), ("teardown", 0.5)]
    (timing,) = timings_of([report("a", seconds, when=when) for when, seconds in phases])
    assert timing.seconds == 3.5
