"""Tabulate schedules: the learning rate of every parameter group at every step.

Groups share a table where their factors are equal: a table of 100,000 learning rates is 2 MB of
JSON, and five groups with a table each made a manifest of 10 MB that took 3.8 s to open on a busy
machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainload.capture.job.definition import ScheduleFunction, SchedulerFactory
from trainload.core.errors import JobError

Schedule = ScheduleFunction | SchedulerFactory


@dataclass(frozen=True, slots=True)
class GroupRates:
    """Learning rates of a group: `base` * `factors`[s] at step s, or `base` if there are no
    factors.
    """

    base: float
    factors: tuple[float, ...] | None = None


def learning_rates(
    schedule: Schedule | None, updates: int, optimizer: torch.optim.Optimizer
) -> list[GroupRates]:
    """Return the learning rates of every group of the optimizer.

    Args:
        schedule: as in `Job.schedule`.
        updates: number of learning rates to tabulate.
        optimizer: the optimizer.

    Raises:
        JobError: the schedule fails, returns a rate that is not finite, depends on a run's metrics,
            or changes other options than learning rates.
    """
    base = [float(g["lr"]) for g in optimizer.param_groups]
    if schedule is None:
        return [GroupRates(b) for b in base]
    first = _call_schedule(schedule, 0) if not _wants_optimizer(schedule) else None
    if first is not None:
        factors = tuple(_call_schedule(schedule, s) for s in range(updates))
        return [GroupRates(b, factors) for b in base]
    # A stand-in with the same options, so that a scheduler that changes momentum or betas finds
    # them and is detected.
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    shadow = torch.optim.SGD(
        [{**o, "params": [nn.Parameter(torch.zeros(1))]} for o in options], lr=0.1
    )
    shadow.defaults = dict(optimizer.defaults)
    try:
        return [
            GroupRates(1.0, tuple(table)) for table in _tabulate(schedule, updates, shadow, options)
        ]
    except JobError:
        raise
    except Exception as error:  # a user's scheduler may raise anything; all of it becomes one line
        raise JobError(
            f"the schedule fails: {type(error).__name__}: {error}", where="Job.schedule"
        ) from error


def _tabulate(
    schedule: Schedule,
    updates: int,
    shadow: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
) -> list[list[float]]:
    scheduler = schedule(shadow)  # type: ignore[arg-type]  # called with an optimizer after `_wants_optimizer`
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise JobError(
            "returns neither a factor nor a scheduler",
            where="Job.schedule",
            got=type(scheduler).__name__,
            expected="a float for a step, or a torch.optim.lr_scheduler for an optimizer",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "the scheduler depends on a metric, but learning rates are fixed before a run",
            where="Job.schedule",
            expected="learning rates that depend only on the step",
            got="ReduceLROnPlateau",
            hint=(
                "Use a schedule that depends on the step. To change it later, evaluate, and resume"
                " with another package."
            ),
        )
    rates: list[list[float]] = [[] for _ in options]
    for step in range(updates):
        if step:
            shadow.step()
            scheduler.step()
        for table, group, before in zip(rates, shadow.param_groups, options, strict=True):
            table.append(_finite(float(group["lr"]), step))
            driven = sorted(
                k for k, v in before.items() if k not in ("lr", "initial_lr") and group.get(k) != v
            )
            if driven:
                raise JobError(
                    f"the scheduler changes {', '.join(driven)}, but only learning rates can be"
                    " scheduled",
                    where=f"Job.schedule at step {step}",
                    expected="changes to learning rates only",
                    got=f"{driven[0]} = {group[driven[0]]}, was {before[driven[0]]}",
                    hint="Pass cycle_momentum=False to the scheduler.",
                )
    return rates


def _finite(rate: float, step: int) -> float:
    if not math.isfinite(rate):
        raise JobError(
            "the learning rate is not finite",
            where=f"Job.schedule at step {step}",
            expected="a finite learning rate",
            got=str(rate),
        )
    return rate


def _wants_optimizer(schedule: Schedule) -> bool:
    """Return True if the schedule is a scheduler factory, that is, if it fails on a step number."""
    try:
        return isinstance(schedule(0), torch.optim.lr_scheduler.LRScheduler)  # type: ignore[arg-type]  # tried with a step number
    except Exception:  # noqa: BLE001 - a factory may raise anything for a number; a call with an optimizer follows
        return True


def _call_schedule(schedule: Schedule, step: int) -> float:
    try:
        value = schedule(step)  # type: ignore[arg-type]  # called with a step after `_wants_optimizer`
    except Exception as error:  # a user's schedule may raise anything; all of it becomes one line
        raise JobError(
            f"fails: {type(error).__name__}: {error}", where=f"Job.schedule at step {step}"
        ) from error
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise JobError(
            "does not return a number",
            where=f"Job.schedule at step {step}",
            expected="a factor",
            got=repr(value),
        )
    return float(value)
