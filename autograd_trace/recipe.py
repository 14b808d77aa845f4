"""The job's numbers, checked, as a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from pydantic import ValidationError

from trainload.autograd_trace.graphs import GroupRecipe, LossScale, Recipe
from trainload.capture.errors import JobError
from trainload.capture.job import Job

_FIELDS = {"clip_norm": "clip_norm", "clip_value": "clip_value", "ema_decay": "ema", "loss_scale": "loss_scaling"}
"""Field of a recipe -> of a job, where they differ or may be wrong."""


def make_recipe(
    job: Job, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[GroupRecipe], schedules: tuple[tuple[float, ...], ...]
) -> Recipe:
    """How a job's graphs are driven.

    Raises:
        JobError: a number is out of its range, or the gradient would be clipped twice.
    """
    try:
        return Recipe(
            optimizer=" + ".join(type(optimizer).__name__ for optimizer in optimizers),
            groups=tuple(groups),
            schedules=schedules,
            steps=job.steps,
            global_batch=job.global_batch or next(iter(job.batch.values())).shape[0],
            clip_norm=job.clip_norm,
            clip_value=job.clip_value,
            ema_decay=None if job.ema is None else job.ema.decay,
            loss_scale=None if job.loss_scaling is None else LossScale(**asdict(job.loss_scaling)),
            seed=job.seed,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = [str(part) for part in first["loc"]]
        if not names:
            raise JobError(first["msg"].removeprefix("Value error, "), where="Job") from error
        where = ".".join([_FIELDS.get(names[0], names[0]), *names[1:]]) if error.title == "Recipe" else f"loss_scaling.{names[0]}"
        raise JobError("is out of its range", where=f"Job.{where}", expected=first["msg"], got=repr(first["input"])) from error
