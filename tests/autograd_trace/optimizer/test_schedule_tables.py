"""Schedules are tables of the learning rates of each group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.autograd_trace.optimizer.captured_updates import (
    ELEMENTWISE,
    adafactor,
    capture_of_the_model,
    captured,
)
from tests.capture.jobs import Model, job
from tests.optimizers import optimizer_of
from torch import nn, optim

from trainload.capture.job.parameter_groups import parameter_groups
from trainload.capture.program import Program
from trainload.core.errors import JobError


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_of_the_model()


def test_a_factor_schedule_is_tabulated(program: Program) -> None:
    recipe, _ = captured(program, ELEMENTWISE["SGD"], schedule=lambda step: 1 / (step + 1), steps=4)
    assert [recipe.rates(step)[0] for step in range(5)] == [
        0.1,
        0.1 * (1 / 2),
        0.1 * (1 / 3),
        0.1 * (1 / 4),
        0.1 * (1 / 4),
    ]


@pytest.mark.parametrize("number", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_a_factor_may_be_a_number_of_another_library(number: Any, program: Program) -> None:
    recipe, _ = captured(program, ELEMENTWISE["SGD"], schedule=lambda step: number, steps=4)
    assert recipe.rates(2) == [0.5 * group.learning_rates[0] for group in recipe.groups]


lr = optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[optim.Optimizer], lr.LRScheduler]] = {
    "a function for all": lambda o: lr.LambdaLR(o, lambda s: 0.9**s),
    "a function for each": lambda o: lr.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (1 + s)]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda s: 0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(
        o, max_lr=[1.0, 2.0], total_steps=6, cycle_momentum=False
    ),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 6),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 3), lr.ExponentialLR(o, 0.9)]),
    "one after another": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 3)], [3]
    ),
}


@pytest.mark.matrix("one after another")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_tabulated_as_it_runs_for_each_group(program: Program, name: str) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(parameter_groups(model, {"*.bias": {"lr": 0.3}}, rest={"lr": 0.1}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's schedulers warn when they are combined
        recipe, _ = optimizer_of(
            job(Model(), optimizer=make, schedule=SCHEDULERS[name], steps=6), program
        )
        real = make(Model())
        scheduler = SCHEDULERS[name](real)
        for step in range(6):
            if step:
                real.step()
                scheduler.step()
            assert recipe.rates(step) == [g["lr"] for g in real.param_groups]


def test_groups_share_a_schedule() -> None:
    recipe, _ = adafactor()
    assert recipe.schedules == ((1.0, 1 / 2, 1 / 3, 1 / 4),)
    assert [(g.learning_rates, g.schedule) for g in recipe.groups] == [((0.1,), 0)] * 2


def test_a_table_of_many_steps_is_kept_once_for_many_groups(program: Program) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(
            [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())]
        )

    recipe, _ = optimizer_of(
        job(
            Model(), optimizer=make, schedule=lambda s: 0.5 + 0.5 * math.cos(s / 1e4), steps=10_000
        ),
        program,
    )
    assert len(recipe.groups) == 4
    assert len(recipe.model_dump_json()) < 250_000
    assert recipe.rates(9_999)[3] == 0.4 * recipe.schedules[0][-1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6),
            "cycle_momentum=False",
        ),
        (lambda step: "fast", "neither a factor|not return a number|fails"),
        (lambda step: float("nan"), "not return a number"),
        (lambda step: 1 / (2 - step), "step 2"),
        (lambda o: optim.lr_scheduler.ReduceLROnPlateau(o), "depends on a metric"),
    ],
)
def test_a_schedule_that_no_table_can_be_is_refused(
    program: Program, schedule: Any, message: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(JobError, match=message):
            captured(program, ELEMENTWISE["AdamW"], schedule=schedule, steps=6)
