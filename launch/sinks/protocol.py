"""The interface of sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

Outcome = Literal["ended", "stopped", "failed"]


class Sink(Protocol):
    """A receiver of a run's numbers."""

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Receive the numbers after `step` updates. `time` is in seconds since 1970."""

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        """Receive an event after `step` updates."""

    def close(self, outcome: Outcome, /) -> None:
        """Close the sink: the run has ended, was stopped, or has failed."""
