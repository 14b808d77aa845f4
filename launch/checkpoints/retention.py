"""Retention of a run's checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping checkpoints. A checkpoint is kept if any rule applies.

    Attributes:
        last: number of the newest checkpoints that are kept, at least 1.
        best: number of checkpoints with the lowest evaluation losses that are kept. Checkpoints
            without an evaluation are not among them.
        every: checkpoints whose step is a multiple of it are kept; None for none.
    """

    last: int = 2
    best: int = 0
    every: int | None = None

    def doomed(self, losses: Mapping[int, float | None]) -> list[int]:
        """Return the steps whose checkpoints are to be deleted, oldest first.

        Args:
            losses: step -> evaluation loss of each existing checkpoint; None if it was not
                evaluated.
        """
        steps = sorted(losses)
        kept_steps = set(steps[-self.last :])
        rated = [
            (loss, step)
            for step, loss in losses.items()
            if loss is not None and math.isfinite(loss)
        ]
        kept_steps |= {step for _, step in sorted(rated)[: self.best]}
        if self.every is not None:
            kept_steps |= {step for step in steps if step % self.every == 0}
        return [step for step in steps if step not in kept_steps]

    def most(self, saves: int, spacing: int) -> int:
        """Return the maximum number of checkpoints that exist after `saves` saves that are
        `spacing` steps apart.
        """
        marked = 0 if self.every is None else saves * spacing // math.lcm(self.every, spacing)
        return min(saves, self.last + self.best + marked)
