"""Failures of attempts, and the decision whether a run is retried after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

LONGEST_PAUSE = 60.0
"""Maximum pause before another attempt, in seconds."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt whose cause another attempt may not have.

    Attributes:
        what: kind of the failure.
        message: description for people.
        ranks: ranks that failed.
        nodes: ids of nodes that failed.
        doing: rank -> its last reported activity.
        cause: exception that ended the attempt.
    """

    what: Literal["death", "node", "hang", "storage", "error"]
    message: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    doing: dict[int, str] = field(default_factory=dict)
    cause: Exception | None = None


class Retries:
    """Count of a run's failures in a row, which decides whether it is retried.

    Failures of storage are retried for a time, other failures for a number of times. Both counts
    begin again with a new checkpoint, that of storage also with a new step.

    Args:
        max_failures: number of failures in a row that are retried.
        storage_patience: seconds for which failures of storage are retried.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self, max_failures: int, storage_patience: float, clock: Callable[[], float]
    ) -> None:
        self._max_failures = max_failures
        self._storage_patience = storage_patience
        self._clock = clock
        self._failures = self._storage_failures = 0
        self._storage_failed_at: float | None = None

    def pause_after(self, failure: Failure, *, saved: bool, stepped: bool) -> float | None:
        """Count a failure.

        Args:
            failure: the failure.
            saved: True if a checkpoint was published since the previous failure.
            stepped: True if there was a step since then, before the run's end.

        Returns:
            The pause before the next attempt in seconds; None if the run is not retried.
        """
        if saved:
            self._failures = 0
        if saved or stepped:
            self._storage_failures, self._storage_failed_at = 0, None
        now = self._clock()
        if failure.what == "storage":
            if self._storage_failed_at is None:
                self._storage_failed_at = now
            is_over = now - self._storage_failed_at > self._storage_patience
            self._storage_failures += 1
        else:
            is_over = self._failures >= self._max_failures
            self._failures += 1
        if is_over:
            return None
        earlier = self._failures + self._storage_failures - 1
        return min(LONGEST_PAUSE, 2.0**earlier) if earlier > 0 else 0.0
