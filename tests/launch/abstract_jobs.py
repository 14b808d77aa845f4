"""Jobs that the command line freezes without weights."""

from __future__ import annotations

from tests.capture.sized import large, small

from trainload.capture.job.definition import Job

DEPTH = 3
"""Number of layers of the large job, greater than that of the reduced job."""


def big() -> Job:
    return large(depth=DEPTH)


def reduced() -> Job:
    return small()


def other() -> Job:
    return small(depth=1)
