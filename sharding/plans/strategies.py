"""Names of strategies, schedules and similar options, for code that needs only the names, such as
the command line's help.

`Plan` documents their meaning.
"""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["single", "zero0", "zero1", "zero2", "zero3", "hybrid"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

Divide = Literal["tensor", "sequence", "context", "expert"]
DIVIDES: tuple[Divide, ...] = get_args(Divide)

BatchNorm = Literal["averaged", "broadcast", "synchronised"]
BATCH_NORMS: tuple[BatchNorm, ...] = get_args(BatchNorm)

Recompute = Literal["job", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)

Schedule = Literal["gpipe", "1f1b", "zero-bubble", "zbv", "dualpipev"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
