"""Schedules of ticks: a fixed interval, or a crontab in a time zone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from trainload.core.errors import RequestError
from trainload.retraining.config.config import Timing

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Schedule(Protocol):
    """A sequence of scheduled times.

    Laws: `last_until(next_after(t)) == next_after(t)`, and no scheduled time is between `t` and
    `next_after(t)`.
    """

    def next_after(self, moment: datetime) -> datetime:
        """Return the first scheduled time after a moment, in UTC."""

    def last_until(self, moment: datetime) -> datetime:
        """Return the last scheduled time that is not after a moment, in UTC."""

    def describe(self) -> str:
        """Return a description for people."""


@dataclass(frozen=True, slots=True)
class Every:
    """A fixed interval, counted from the beginning of 1970 in UTC, so that it is the same on every
    machine.
    """

    span: timedelta

    def next_after(self, moment: datetime) -> datetime:
        """Return the first scheduled time after a moment, in UTC."""
        return self.last_until(moment) + self.span

    def last_until(self, moment: datetime) -> datetime:
        """Return the last scheduled time that is not after a moment, in UTC."""
        return _EPOCH + (moment.astimezone(UTC) - _EPOCH) // self.span * self.span

    def describe(self) -> str:
        """Return a description for people."""
        return f"every {self.span}"


class Cron:
    """A crontab in a time zone.

    When clocks go forward, a time in the gap runs at the first time after it; when they go back, a
    repeated time runs only the first time. Hourly and more frequent times continue evenly in both
    cases. Debian's cron and cronsim do the same.

    Args:
        text: five fields: minute, hour, day of the month, month, day of the week.
        zone: IANA name of the time zone.

    Raises:
        RequestError: the crontab is invalid or never due, or the time zone is unknown.
    """

    def __init__(self, text: str, zone: str = "UTC") -> None:
        self._text = text
        try:
            self._zone = ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise RequestError(
                "there is no such time zone",
                where="schedule.zone",
                expected="an IANA name, such as Europe/Berlin",
                got=zone,
            ) from error
        if len(text.split()) != 5:
            raise RequestError(
                "a crontab expression has five fields",
                where="schedule.cron",
                expected='such as "0 3 * * *"',
                got=text,
            )
        try:
            self.next_after(datetime.now(UTC))
        except (CronSimError, StopIteration) as error:
            problem = str(error) or "it never occurs"
            raise RequestError(
                f"this is not a crontab expression: {problem}",
                where="schedule.cron",
                expected='such as "0 3 * * *"',
                got=text,
            ) from error

    def next_after(self, moment: datetime) -> datetime:
        """Return the first scheduled time after a moment, in UTC."""
        times: Iterator[datetime] = CronSim(self._text, moment.astimezone(self._zone))
        for scheduled in times:
            if scheduled.astimezone(UTC) > moment:
                return scheduled.astimezone(UTC)
        raise StopIteration

    def last_until(self, moment: datetime) -> datetime:
        """Return the last scheduled time that is not after a moment, in UTC."""
        # At clock changes cronsim's backward iteration yields other times than the forward one, so
        # it only yields a start.
        later = moment.astimezone(self._zone) + timedelta(days=1)
        for before in CronSim(self._text, later, reverse=True):
            start = before.astimezone(UTC) - timedelta(days=1)
            if start >= moment:
                continue
            last = None
            at = self.next_after(start)
            while at <= moment:
                last, at = at, self.next_after(at)
            if last is not None:
                return last
        raise StopIteration

    def describe(self) -> str:
        """Return a description for people."""
        text: str = CronSim(self._text, _EPOCH).explain()
        return f"{text}, {self._zone.key}"


def schedule_of(timing: Timing) -> Schedule:
    """Return the schedule of a retraining. Raises RequestError, as `Cron` does."""
    if timing.every is not None:
        return Every(timing.every)
    assert timing.cron is not None, "a schedule is one or the other"
    return Cron(timing.cron, timing.zone)
