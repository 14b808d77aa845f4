"""The loop that runs ticks as they are due, through clocks that jump, machines that sleep, and ticks that fail."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

from trainload.core.errors import ClusterError, DataError, RunInterrupted, StorageError, TrainloadError, WorkError
from trainload.core.processes import heeded
from trainload.retraining.ticks.tick_times import Schedule

LONGEST_WAIT = 60.0
"""Seconds after which the clock is looked at again, since it may have been set, and the machine may have slept."""

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0
"""Seconds until a tick is run again that has failed."""
_PASSING = (StorageError, ClusterError, DataError, WorkError)
"""What a tick may fail of that may be another the next time."""

_LATE = timedelta(seconds=2 * LONGEST_WAIT)
"""A tick that is later than this, or than half the time to the next one, was missed."""

Missed = Literal["skip", "once"]


class Clock(Protocol):
    """What time it is, and waiting for it."""

    def now(self) -> datetime:
        """The time, in UTC."""

    def wait(self, seconds: float) -> bool:
        """Waits. Returns: whether to end."""


class WallClock:
    """The machine's clock. SIGTERM, SIGINT and SIGHUP end the waiting; a second one ends the process as it always does."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def now(self) -> datetime:
        """As of every clock."""
        return datetime.now(UTC)

    def wait(self, seconds: float) -> bool:
        """As of every clock."""
        return self._ended.wait(seconds)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Within it the first of them asks the loop to end, after the tick that is under way."""
        before = heeded(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

        def ask(number: int, frame: object) -> None:
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
    """Runs ticks as they are due, until it is asked to end.

    Laws: scheduled times are run in their order, none that is not scheduled, and none again that did not fail. Of several that passed while
    nothing ran, one is run, the last; where `missed` is "skip", none that has passed for longer than a moment.

    Args:
        schedule: when.
        missed: what happens to times that have passed before it began, or while a tick ran or the machine slept.
        tick: runs one. Where it raises a TrainloadError, that is told. Where this is of storage, data, cluster or work, the tick is run
            again after a pause that doubles each time, while the next one is not due: it says itself when it has failed often enough.
        last_done: the last time that was run, by whomever; None: there was none.
        on_event: told what happens.
        clock: the time; None: the machine's, which heeds signals.
        ticks: end after so many; None: do not.

    Returns:
        How many were run.
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
    after = last_done() or (schedule.last_until(began) if missed == "skip" else _before(schedule, began))
    done = 0
    told: datetime | None = None
    while ticks is None or done < ticks:
        now = clock.now()
        due = schedule.next_after(after)
        if due > now:
            if due != told:
                on_event(f"the next tick is due at {due:%Y-%m-%dT%H:%M:%SZ}")
                told = due
            if clock.wait(min(LONGEST_WAIT, (due - now).total_seconds())):
                break
            continue
        last = schedule.last_until(now)
        after = last
        if missed == "skip" and (now - last) > min(_LATE, (schedule.next_after(last) - last) / 2):
            on_event(f"missed and skipped: the ticks from {due:%Y-%m-%dT%H:%M:%SZ} to {last:%Y-%m-%dT%H:%M:%SZ}")
            continue
        if last > due:
            on_event(f"missed: the ticks from {due:%Y-%m-%dT%H:%M:%SZ} on; running {last:%Y-%m-%dT%H:%M:%SZ} in their place")
        done += 1
        if _run(schedule, last, tick, on_event, clock):
            break
        after = max(after, _last(last_done, on_event) or after)
    return done


def _last(last_done: Callable[[], datetime | None], on_event: Callable[[str], None]) -> datetime | None:
    """The last time that was run, as far as the store can be asked."""
    try:
        return last_done()
    except _PASSING as error:
        on_event(f"the ticks that have run cannot be read: {error}")
        return None


def _run(schedule: Schedule, when: datetime, tick: Callable[[datetime], object], on_event: Callable[[str], None], clock: Clock) -> bool:
    """Runs a tick; again, after a pause, where it fails of what may pass, while the next one is not due. Returns: whether to end."""
    pause = FIRST_PAUSE
    while True:
        try:
            tick(when)
            return clock.wait(0.0)
        except TrainloadError as error:
            said = f"tick {when:%Y-%m-%dT%H:%M:%SZ} failed: {error}"
            again = clock.now() + timedelta(seconds=pause)
            if isinstance(error, RunInterrupted) or not isinstance(error, _PASSING) or again >= schedule.next_after(when):
                on_event(said)
                return clock.wait(0.0)
            on_event(f"{said}; retrying in {pause:.0f} s")
        while (left := (again - clock.now()).total_seconds()) > 0:
            if clock.wait(min(LONGEST_WAIT, left)):
                return True
        pause = min(2 * pause, LONGEST_PAUSE)


def _before(schedule: Schedule, moment: datetime) -> datetime:
    """A time after which the last scheduled one until a moment comes."""
    return schedule.last_until(moment) - timedelta(microseconds=1)
