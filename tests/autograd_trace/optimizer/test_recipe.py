"""Recipes hold the numbers of a job."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.capture.jobs import Model, job
from torch.export import ExportedProgram

import trainload
from trainload.autograd_trace.graphs import GroupRecipe, Recipe
from trainload.autograd_trace.optimizer.recipe import make_recipe
from trainload.autograd_trace.optimizer.trainers import make_optimizers, trainers_of
from trainload.capture.program import GraphCapture, OutputRole, OutputSpec, Program
from trainload.core.errors import JobError

PROGRAM = Program(
    {
        "train": GraphCapture(
            "train", cast(ExportedProgram, None), (), (OutputSpec("loss", OutputRole.LOSS),)
        )
    },
    (),
    (),
    {},
    {},
)


def made(**options: Any) -> Recipe:
    given = job(Model(), **options)
    group = GroupRecipe(name="group0", parameters=("first.weight",), learning_rates=(0.1,))
    return make_recipe(
        given,
        PROGRAM,
        trainers_of(given, PROGRAM, (), make_optimizers(given)),
        [group],
        (),
        {"train": ["group0"]},
        (),
    )


def test_what_the_job_says_is_in_the_recipe() -> None:
    recipe = made(
        clip_value=0.5,
        ema=trainload.Ema(0.9),
        loss_scaling=trainload.LossScaling(init_scale=8.0),
        steps=3,
        seed=4,
    )
    assert (recipe.optimizer, recipe.steps, recipe.seed, recipe.global_batch) == ("SGD", 3, 4, 4)
    assert (recipe.clip_norm, recipe.clip_value, recipe.ema_decay) == (None, 0.5, 0.9)
    assert recipe.loss_scale is not None
    assert recipe.loss_scale.model_dump() == {
        "init_scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1.0, "clip_value": 1.0}, "not both"),
        ({"clip_norm": -1.0}, r"Job\.clip_norm"),
        ({"clip_value": 0.0}, r"Job\.clip_value"),
        ({"ema": trainload.Ema(decay=1.0)}, r"Job\.ema: .*less than 1, got 1\.0"),
        (
            {"loss_scaling": trainload.LossScaling(backoff_factor=2.0)},
            r"Job\.loss_scaling\.backoff_factor",
        ),
        ({"steps": 0}, r"Job\.steps"),
    ],
)
def test_a_number_out_of_its_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        made(**options)
