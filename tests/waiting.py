"""Wait for a condition, with a generous time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(
    condition: Callable[[], Result],
    seconds: float = 120.0,
    meanwhile: Callable[[], object] = lambda: None,
    every: float = 0.02,
) -> Result:
    """Return the result of `condition` as soon as it is true.

    Args:
        condition: called repeatedly.
        seconds: time limit. The machine may be busy, so it does not measure how long the condition
            should take.
        meanwhile: called before each retry; may raise if waiting is useless, for example because a
            process has ended.
        every: seconds between attempts.

    Raises:
        AssertionError: the condition is not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"it takes too long: more than {seconds:g} s"
        meanwhile()
        time.sleep(every)
    return result
