"""Ticks of a small package, with real runs in this process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trainload.packaging.package import Package
from trainload.retraining.config.config import Config, checked
from trainload.retraining.ticks.tick import Scheduler
from trainload.retraining.ticks.tick_records import Ended, name_of
from trainload.retraining.ticks.tick_stages import Opening, Stages

LINE = "small"
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def day(number: int) -> datetime:
    return FIRST + timedelta(days=number)


def name(number: int) -> str:
    return name_of(day(number))


def config_of(folder: Path, package: Package, **changes: Any) -> Config:
    least = {
        "store": str(folder / "store"),
        "line": LINE,
        "package": str(package.path),
        "runs": str(folder / "runs"),
        "data": {"files": str(folder / "data" / "*.arrow")},
        "evaluation": {"hold_out": 0.25},
        "train": {"epochs": 2},
        "cluster": {"backend": "local", "compile": False},
        "gate": {"require": "eval.loss <= champion.eval.loss * 1.05"},
    }
    return checked({**least, **changes}, "the test")


def tick(config: Config, number: int, said: list[str] | None = None) -> Ended:
    say = (said if said is not None else []).append
    return Scheduler(config, Stages(Opening(), say), say).tick(day(number))
