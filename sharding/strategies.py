"""The names of strategies and schedules, for who needs no more than that, such as the command line's help. `Plan` says what they mean."""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["single", "zero0", "zero1", "zero2", "zero3", "hybrid"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

Schedule = Literal["gpipe", "1f1b", "zero-bubble", "zbv", "dualpipev"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
