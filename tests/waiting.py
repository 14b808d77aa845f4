"""Wait for a condition, with a generous limit."""

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
        condition: is called again and again.
        seconds: the limit. A machine may be busy, so it is no measure of how long the condition
            should take.
        meanwhile: is called before each try but the first, and may fail where waiting is of no use:
            a process has ended.
        every: seconds between tries.

    Raises:
        AssertionError: it is not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"it takes too long: more than {seconds:g} s"
        meanwhile()
        time.sleep(every)
    return result
