"""What a sink is: its name in a run's settings, and its methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

SinkName = Literal["tensorboard", "mlflow", "prometheus"]
Outcome = Literal["ended", "stopped", "failed"]


class Sink(Protocol):
    """Takes a run's numbers."""

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Of the state after `step` updates. time: seconds since 1970."""

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        """Something that happened after `step` updates."""

    def close(self, outcome: Outcome, /) -> None:
        """Nothing more will come: the run has ended, was stopped, or has failed."""
