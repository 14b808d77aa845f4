"""The scheduler loop: run ticks when they are due, tolerating clock changes, suspended machines and
failing ticks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

from trainload.core.errors import (
    ClusterError,
    DataError,
    RunInterrupted,
    StorageError,
    TrainloadError,
    WorkError,
)
from trainload.core.processes import cancel_abort, unignored_handlers
from trainload.retraining.ticks.tick_times import Schedule

LONGEST_WAIT = 60.0
"""Seconds after which the clock is read again, since it may have been set, or the machine
suspended.
"""

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0
"""Minimum and maximum seconds until a failed tick is retried."""
_TEMPORARY_ERRORS = (StorageError, ClusterError, DataError, WorkError)
"""Errors after which a tick is retried, since their causes may be temporary."""

_LATE = timedelta(seconds=2 * LONGEST_WAIT)
"""A tick that is later than this, or than half the time to the next one, counts as missed."""

Missed = Literal["skip", "once"]


class Clock(Protocol):
    """A clock that can wait."""

    def now(self) -> datetime:
        """Return the time in UTC."""

    def wait(self, seconds: float) -> bool:
        """Wait; return True if the loop should end."""


class WallClock:
    """The machine's clock.

    SIGTERM, SIGINT or SIGHUP end the waiting; a second signal has its usual effect.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()

    def now(self) -> datetime:
        """Return the time in UTC."""
        return datetime.now(UTC)

    def wait(self, seconds: float) -> bool:
        """Wait; return True if a signal was received."""
        return self._ended.wait(seconds)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Handle signals within the context: the first one makes the loop end after the current
        tick.
        """
        before = unignored_handlers(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

        def ask(number: int, frame: object) -> None:
            cancel_abort()
            self._ended.set()
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    schedule: Schedule,
    missed: Missed,
    tick: Callable[[datetime], object],
    last_done: Callable[[], datetime | None],
    *,
    on_event: Callable[[str], None],
    clock: Clock | None = None,
    ticks: int | None = None,
) -> int:
    """Run ticks when they are due, until a signal ends the loop.

    Laws: only scheduled times are run, in order, and a tick is repeated only if it failed. If
    several times have passed while nothing ran, only the last one is run; with `missed` "skip",
    none of them, unless it passed just now.

    Args:
        schedule: schedule of the ticks.
        missed: treatment of times that passed before the loop began, while a tick ran, or while the
            machine was suspended.
        tick: runs a tick. A TrainloadError is reported. After an error of storage, data, cluster or
            work, the tick is retried until the next one is due, after a pause that doubles each
            time; the tick itself limits its attempts.
        last_done: returns the time of the last finished tick, of any process; None if there is
            none.
        on_event: called with progress messages.
        clock: the clock; None for the machine's, with signal handling.
        ticks: number of ticks after which the loop ends; None for no limit.

    Returns:
        The number of ticks that were run.
    """
    if clock is None:
        wall = WallClock()
        with wall.heeding_signals():
            return _serve(schedule, missed, tick, last_done, on_event, wall, ticks)
    return _serve(schedule, missed, tick, last_done, on_event, clock, ticks)


def _serve(
    schedule: Schedule,
    missed: Missed,
    tick: Callable[[datetime], object],
    last_done: Callable[[], datetime | None],
    on_event: Callable[[str], None],
    clock: Clock,
    ticks: int | None,
) -> int:
    began = clock.now()
    after = last_done() or (
        schedule.last_until(began) if missed == "skip" else _before(schedule, began)
    )
    finished = 0
    announced: datetime | None = None
    while ticks is None or finished < ticks:
        now = clock.now()
        due = schedule.next_after(after)
        if due > now:
            if due != announced:
                on_event(f"the next tick is due at {due:%Y-%m-%dT%H:%M:%SZ}")
                announced = due
            if clock.wait(min(LONGEST_WAIT, (due - now).total_seconds())):
                break
            continue
        last = schedule.last_until(now)
        after = last
        if missed == "skip" and (now - last) > min(_LATE, (schedule.next_after(last) - last) / 2):
            on_event(
                f"missed and skipped: the ticks from {due:%Y-%m-%dT%H:%M:%SZ} to"
                f" {last:%Y-%m-%dT%H:%M:%SZ}"
            )
            continue
        if last > due:
            on_event(
                f"missed: the ticks from {due:%Y-%m-%dT%H:%M:%SZ} on; running"
                f" {last:%Y-%m-%dT%H:%M:%SZ} in their place"
            )
        finished += 1
        if _run(schedule, last, tick, on_event, clock):
            break
        after = max(after, _last(last_done, on_event) or after)
    return finished


def _last(
    last_done: Callable[[], datetime | None], on_event: Callable[[str], None]
) -> datetime | None:
    """Return the time of the last finished tick; None if there is none, or the store is not
    reachable.
    """
    try:
        return last_done()
    except _TEMPORARY_ERRORS as error:
        on_event(f"the ticks that have run cannot be read: {error}")
        return None


def _run(
    schedule: Schedule,
    when: datetime,
    tick: Callable[[datetime], object],
    on_event: Callable[[str], None],
    clock: Clock,
) -> bool:
    """Run a tick, and retry it after temporary errors until the next one is due; return True if the
    loop should end.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            tick(when)
            return clock.wait(0.0)
        except TrainloadError as error:
            message = f"tick {when:%Y-%m-%dT%H:%M:%SZ} failed: {error}"
            retry_at = clock.now() + timedelta(seconds=pause)
            if (
                isinstance(error, RunInterrupted)
                or not isinstance(error, _TEMPORARY_ERRORS)
                or retry_at >= schedule.next_after(when)
            ):
                on_event(message)
                return clock.wait(0.0)
            on_event(f"{message}; retrying in {pause:.0f} s")
        while (remaining := (retry_at - clock.now()).total_seconds()) > 0:
            if clock.wait(min(LONGEST_WAIT, remaining)):
                return True
        pause = min(2 * pause, LONGEST_PAUSE)


def _before(schedule: Schedule, moment: datetime) -> datetime:
    """Return a time just before the last scheduled time that is not after `moment`."""
    return schedule.last_until(moment) - timedelta(microseconds=1)
