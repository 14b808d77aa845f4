"""Build the recipe from the job's settings, and validate them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pydantic import ValidationError

from trainload.autograd_trace.graphs import GraphRecipe, GroupRecipe, LossScale, Recipe, TurnRecipe
from trainload.autograd_trace.optimizer.trainers import Trainer, main_of
from trainload.capture.job.definition import Ema, Job
from trainload.capture.job.inputs import leaves_of
from trainload.capture.program import Mode, Program
from trainload.core.arguments import out_of_range
from trainload.core.errors import JobError

_FIELDS = {
    "clip_norm": "clip_norm",
    "clip_value": "clip_value",
    "ema_decay": "ema",
    "loss_scale": "loss_scaling",
}
"""Field of a recipe -> field of a job, for the fields whose name differs or whose value may be
invalid.
"""


def make_recipe(
    job: Job,
    program: Program,
    trainers: Sequence[Trainer],
    groups: Sequence[GroupRecipe],
    schedules: tuple[tuple[float, ...], ...],
    groups_of: Mapping[str, Sequence[str]],
    loop: tuple[TurnRecipe, ...],
) -> Recipe:
    """Return the recipe that says how a job's graphs are driven.

    Args:
        job: the job with the settings.
        program: its graphs.
        trainers: its optimizers.
        groups: all parameter groups.
        schedules: tables of learning rate factors that the groups share.
        groups_of: training graph, of each variant -> the groups whose parameters get a gradient
            from it.
        loop: result of `make_loop`.

    Raises:
        JobError: a number is out of range, or the gradient would be clipped twice.
    """
    optimizers = [optimizer for trainer in trainers for optimizer in trainer.optimizers]
    names = [group.name for group in groups]
    several = bool(loop) or any(list(members) != names for members in groups_of.values())
    feeds = {name: dict(graph.feeds) for name, graph in job.graphs.items() if graph.feeds}
    try:
        return Recipe(
            optimizer=" + ".join(type(optimizer).__name__ for optimizer in optimizers),
            groups=tuple(groups),
            schedules=schedules,
            steps=job.steps,
            global_batch=_rows(job) if job.global_batch is None else job.global_batch,
            clip_norm=None if several else job.clip_norm,
            clip_value=None if several else job.clip_value,
            ema_decay=None if several else _decay_of(job.ema),
            loss_scale=None if job.loss_scaling is None else LossScale(**asdict(job.loss_scaling)),
            seed=job.seed,
            main=main_of(job),
            loop=loop,
            graphs={
                n: _graph(job, g.graph, groups_of.get(n, ()))
                for n, g in program.graphs.items()
                if g.mode is Mode.TRAIN
            }
            if several
            else {},
            feeds=feeds,
        )
    except ValidationError as error:
        raise _field_error(error, "Job") from error


def _graph(job: Job, name: str, groups: Sequence[str]) -> GraphRecipe:
    own = job.graphs.get(name)
    clips = own is not None and (own.clip_norm is not None or own.clip_value is not None)
    try:
        return GraphRecipe(
            groups=tuple(groups),
            clip_norm=own.clip_norm if own is not None and clips else job.clip_norm,
            clip_value=own.clip_value if own is not None and clips else job.clip_value,
            ema_decay=_decay_of(job.ema if own is None or own.ema is None else own.ema),
        )
    except ValidationError as error:
        raise _field_error(error, f"Job.graphs[{name!r}]" if own is not None else "Job") from error


def _rows(job: Job) -> int:
    """Return the number of rows of the example batch."""
    return next(iter(leaves_of(job.batch, values=False).values())).shape[0]


def _decay_of(ema: Ema | None) -> float | None:
    return None if ema is None else ema.decay


def _field_error(error: ValidationError, place: str) -> JobError:
    first = error.errors(include_url=False, include_context=False)[0]
    names = [str(part) for part in first["loc"]]
    if not names:
        return JobError(first["msg"].removeprefix("Value error, "), where=place)
    own = error.title in ("Recipe", "GraphRecipe")
    return out_of_range(error, JobError, place if own else f"{place}.loss_scaling", _FIELDS)
