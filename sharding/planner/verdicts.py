"""Why a candidate of a search was not chosen."""

from __future__ import annotations

from trainload.core.formatting import interval, size
from trainload.sharding.planner.search import Candidate, Found

TIMES = ("compute", "exposed", "bubble", "update")
"""Parts of the time of an update: the fields of `StepTime`."""


def verdict_on(result: Found, candidate: Candidate) -> str:
    """Return why a candidate is not the best one, or in which respect it is the best."""
    best = result.best
    over = candidate.costs.memory.peak - result.device.memory_bytes
    if over > 0:
        return f"needs {size(over)} more than is available"
    if best is None or candidate is best:
        return "the fastest that fits"
    time, best_time = candidate.costs.time, best.costs.time
    excess = {name: getattr(time, name) - getattr(best_time, name) for name in TIMES}
    worst = max(excess, key=lambda name: excess[name])
    return (
        f"{time.seconds / best_time.seconds - 1:.1%} slower: {interval(excess[worst])} more {worst}"
    )
