"""Jobs that the command line freezes without weights."""

from __future__ import annotations

from tests.capture.sized import large, small

from trainload.capture.job import Job


def big() -> Job:
    return large()


def reduced() -> Job:
    return small()


def other() -> Job:
    return small(depth=1)
