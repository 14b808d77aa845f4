"""Which checkpoints of a run are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept: those that any of the three wants.

    Attributes:
        last: the newest, at least 1.
        best: so many whose evaluation had the lowest losses. One that was not evaluated is none of them.
        every: those whose step is a multiple of it; None: none for that reason.
    """

    last: int = 2
    best: int = 0
    every: int | None = None

    def doomed(self, found: Mapping[int, float | None]) -> list[int]:
        """The steps whose checkpoints are deleted, oldest first.

        Args:
            found: step -> loss of its evaluation, None where there was none, of all checkpoints that there are.
        """
        steps = sorted(found)
        kept = set(steps[-self.last :])
        rated = [(loss, step) for step, loss in found.items() if loss is not None and math.isfinite(loss)]
        kept |= {step for _, step in sorted(rated)[: self.best]}
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        return [step for step in steps if step not in kept]

    def most(self, saves: int, spacing: int) -> int:
        """How many checkpoints there are at most after so many, `spacing` steps apart."""
        marked = 0 if self.every is None else saves * spacing // math.lcm(self.every, spacing)
        return min(saves, self.last + self.best + marked)
