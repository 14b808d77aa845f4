"""Due times of ticks: intervals, and crontabs in time zones with clock changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainload.core.errors import RequestError
from trainload.retraining.config.config import Timing
from trainload.retraining.ticks.tick_times import Cron, Every, Schedule, schedule_of

MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC))
BERLIN = "Europe/Berlin"


def times(schedule: Schedule, start: str, count: int) -> list[str]:
    at, found = datetime.fromisoformat(start), []
    for _ in range(count):
        at = schedule.next_after(at)
        found.append(f"{at:%Y-%m-%dT%H:%M}")
    return found


def test_every_hour_is_the_same_on_every_machine() -> None:
    assert times(Every(timedelta(hours=1)), "2026-11-23T06:59:59+00:00", 2) == [
        "2026-11-23T07:00",
        "2026-11-23T08:00",
    ]


def test_a_scheduled_time_is_not_after_itself() -> None:
    assert times(Every(timedelta(hours=1)), "2026-11-23T07:00:00+00:00", 1) == ["2026-11-23T08:00"]


def test_a_crontab_is_in_its_zone() -> None:
    assert times(Cron("0 3 * * *", BERLIN), "2026-07-01T00:00+00:00", 1) == ["2026-07-01T01:00"]
    assert times(Cron("0 3 * * *", BERLIN), "2026-12-01T00:00+00:00", 1) == ["2026-12-01T02:00"]


def test_a_time_that_there_is_not_runs_after_the_gap() -> None:
    """On 2026-03-29 clocks in Berlin go from 2:00 to 3:00, which is 1:00 in UTC."""
    assert times(Cron("30 2 * * *", BERLIN), "2026-03-28T12:00+00:00", 2) == [
        "2026-03-29T01:00",
        "2026-03-30T00:30",
    ]


def test_a_time_that_there_is_twice_runs_once() -> None:
    """On 2026-10-25 clocks in Berlin go from 3:00 to 2:00, which is 1:00 in UTC."""
    assert times(Cron("30 2 * * *", BERLIN), "2026-10-24T12:00+00:00", 2) == [
        "2026-10-25T00:30",
        "2026-10-26T01:30",
    ]


@pytest.mark.parametrize("start", ["2026-03-28T20:00+00:00", "2026-10-24T20:00+00:00"])
def test_what_comes_every_hour_goes_on_evenly(start: str) -> None:
    found = [datetime.fromisoformat(each) for each in times(Cron("15 * * * *", BERLIN), start, 12)]
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(hours=1)}


def test_a_day_that_is_rare_is_found() -> None:
    assert times(Cron("0 0 29 2 *"), "2026-01-01T00:00+00:00", 2) == [
        "2028-02-29T00:00",
        "2032-02-29T00:00",
    ]
    assert Cron("0 0 29 2 *").last_until(datetime(2026, 1, 1, tzinfo=UTC)) == datetime(
        2024, 2, 29, tzinfo=UTC
    )


SCHEDULES = [
    Every(timedelta(minutes=7)),
    Every(timedelta(days=1)),
    Cron("*/20 * * * *", BERLIN),
    Cron("30 2 * * *", BERLIN),
    Cron("0 0,12 * * 1-5", "America/New_York"),
    Cron("45 1 * * *", "Australia/Lord_Howe"),
    Cron("0 9 1 * *", "Asia/Kathmandu"),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.describe())
@given(moment=MOMENTS)
@settings(max_examples=30, deadline=None)
def test_the_next_time_is_a_scheduled_one_and_there_is_none_before_it(
    schedule: Schedule, moment: datetime
) -> None:
    due = schedule.next_after(moment)
    assert due > moment
    assert schedule.last_until(due) == due
    last = schedule.last_until(due - timedelta(microseconds=1))
    assert last <= moment
    assert schedule.next_after(last) == due


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("61 * * * *", "Bad minute"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("* * * *", "five fields"),
        ("* * * * * *", "five fields"),
        ("x", "five"),
    ],
)
def test_what_is_no_crontab_is_refused(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Cron(text)


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "../../etc/passwd", ""])
def test_a_zone_that_there_is_not_is_refused(zone: str) -> None:
    with pytest.raises(RequestError, match="there is no such time zone"):
        Cron("0 3 * * *", zone)


def test_a_schedule_is_told_in_words() -> None:
    assert Cron("0 3 * * *", BERLIN).describe() == "At 03:00 every day, Europe/Berlin"


def test_a_file_says_which() -> None:
    assert schedule_of(Timing.model_validate({"every": "6h"})) == Every(timedelta(hours=6))
    assert (
        schedule_of(Timing.model_validate({"cron": "0 3 * * *", "zone": BERLIN}))
        .describe()
        .startswith("At 03:00")
    )
