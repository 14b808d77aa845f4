"""Capture an optimizer: its update as graphs, its hyperparameters and schedule as data.

An elementwise update is captured once for each parameter group, over a flat tensor of any length,
and runs on whatever slice a rank holds. An update that needs a whole parameter (a norm, a factored
moment, a matrix product) is captured once for each shape in the group; each of these becomes a
group of its own in the recipe.

A captured Adam computes 1 - beta2 ** t in float32, as torch's `capturable=True` does. Its first
updates differ from the default path by about 1e-5.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainload.autograd_trace.graphs import GroupRecipe, Recipe, UpdateGraph
from trainload.autograd_trace.optimizer.bound_optimizer import is_torchs
from trainload.autograd_trace.optimizer.elementwise import is_elementwise
from trainload.autograd_trace.optimizer.lr_schedule import learning_rates
from trainload.autograd_trace.optimizer.optimizer_groups import group_parameters
from trainload.autograd_trace.optimizer.recipe import make_recipe
from trainload.autograd_trace.optimizer.trainers import Optimizers, make_loop, trainers_of
from trainload.autograd_trace.optimizer.update_check import (
    check_alike,
    check_separate,
    check_update,
)
from trainload.autograd_trace.optimizer.update_graph import EXAMPLE, capture_update, checked_shape
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.core.errors import CaptureError, JobError
from trainload.core.work_steps import begin_step

_FLAT_SHAPES = ((EXAMPLE + 1,), (), (5, 13), (2, 3, 3, 4))
"""Shapes of parameters on which an update over flat tensors must equal the optimizer's own.

For a class that is not torch's, the group's own shapes are added: whether it works on slices may
depend on a parameter's size (newer Adafactors factor from 16 rows on).
"""


def capture_optimizer(
    job: Job, program: Program, optimizers: Optimizers
) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Capture the job's optimizers and schedules.

    Args:
        job: the job with the schedules and settings.
        program: program that was captured after `optimizers` were made.
        optimizers: result of `make_optimizers(job)`.

    Raises:
        JobError: the optimizer does not fit the model or the schedule fails.
        CaptureError: the update is not a function of (param, grad, state, lr) that can be captured.
    """
    loop = make_loop(job)
    trainers = trainers_of(job, program, loop, optimizers)
    specs = {p.name: p for p in program.parameters}
    schedules: dict[tuple[float, ...], None] = {}
    recipes: list[GroupRecipe] = []
    updates: list[UpdateGraph] = []
    groups_of: dict[str, list[str]] = {}
    for trainer in trainers:
        for optimizer in trainer.optimizers:
            _check_kind(optimizer, trainer.where)
        of_group = [optimizer for optimizer in trainer.optimizers for _ in optimizer.param_groups]
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [
            group_rates
            for optimizer in trainer.optimizers
            for group_rates in learning_rates(trainer.schedule, trainer.updates, optimizer)
        ]
        for number, names in enumerate(
            group_parameters(job.model, trainer.reached(), groups, trainer.where)
        ):
            if not names:
                continue
            kinds = {specs[n].dtype for n in names}
            if len(kinds) > 1:
                raise JobError(
                    "a parameter group mixes dtypes",
                    where=f"{trainer.where}: group {number}",
                    expected="one dtype",
                    got=str(sorted(kinds)),
                    hint="Use one parameter group for each dtype.",
                )
            shapes = {n: tuple(specs[n].shape) for n in names}
            begin_step(f"capturing the update of group {number + 1} of {len(groups)}")
            table = rates[number].factors
            if table is not None:
                schedules.setdefault(table)
            group_updates = _capture_group(
                f"{trainer.prefix}group{number}",
                of_group[number],
                groups[number],
                getattr(torch, kinds.pop()),
                shapes,
            )
            for update in group_updates:
                fitting = [n for n in names if update.shape is None or shapes[n] == update.shape]
                for name, members, graphs in trainer.parts(update.group, fitting):
                    recipes.append(
                        GroupRecipe(
                            name=name,
                            parameters=members,
                            learning_rates=(rates[number].base,),
                            schedule=None if table is None else list(schedules).index(table),
                            clock=trainer.clock,
                        )
                    )
                    updates.append(dataclasses.replace(update, group=name))
                    for graph in graphs:
                        groups_of.setdefault(graph, []).append(name)
    for trainer in trainers:
        reached = trainer.reached()
        followed = {id(p): name for name, p in job.model.named_parameters() if name in reached}
        for optimizer in trainer.optimizers:
            check_alike(optimizer, followed)
    return make_recipe(job, program, trainers, recipes, tuple(schedules), groups_of, loop), tuple(
        updates
    )


def _check_kind(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise CaptureError for kinds of optimizers that no graph can express."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            "the optimizer requires a closure and evaluates it any number of times, so it has no"
            " fixed update",
            where=f"{where}: {type(optimizer).__name__}",
            expected="an update of (parameter, gradient, state)",
            hint="Use AdamW or SGD.",
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise CaptureError(
            "the optimizer evaluates the model with weights that differ from the trained ones (its"
            " train() and eval())",
            where=f"{where}: {type(optimizer).__name__}",
            expected="the weights that the updates produce",
            hint=(
                "Use AdamW or SGD with Job.ema: its averaged weights are used in evaluations and"
                " stored in the trained package."
            ),
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise CaptureError(
            "the optimizer has no learning rate",
            where=f"{where}: {type(optimizer).__name__}",
            expected='"lr" among the options of each group',
            hint="Set one. transformers' Adafactor accepts one with relative_step=False.",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(
            "the optimizer requires sparse gradients, but the gradients of a step graph are dense",
            where=f"{where}: SparseAdam",
            hint=(
                "Use Adam, which also updates the rows of an embedding that were not looked up,"
                " because of their moments."
            ),
        )


def _capture_group(
    name: str,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[UpdateGraph]:
    """Return one update over flat tensors, or one for each shape if the update needs whole
    parameters.
    """
    try:
        update, steps = capture_update(name, optimizer, group, dtype, None)
        elementwise = is_elementwise(update) and all(
            is_elementwise(u) for u in _with_dims(name, optimizer, group, dtype)
        )
        if elementwise:
            own = (
                ()
                if is_torchs(optimizer)
                else sorted({checked_shape(shape) for shape in shapes.values()})
            )
            for shape in (*_FLAT_SHAPES, *own):
                check_update(update, optimizer, group, dtype, shape, steps)
            check_separate(optimizer, group, dtype, (5, 13))
    except CaptureError:  # it may work on whole parameters; if not, that attempt reports why
        elementwise = False
    return (
        [update]
        if elementwise
        else [
            _capture_whole(name, optimizer, group, dtype, s) for s in sorted(set(shapes.values()))
        ]
    )


def _capture_whole(
    name: str,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> UpdateGraph:
    smaller = checked_shape(shape)
    try:
        update, steps = capture_update(
            f"{name}-{'x'.join(map(str, shape)) or 'scalar'}", optimizer, group, dtype, shape
        )
    except CaptureError:
        # a dependence on other parameters is reported as such
        check_separate(optimizer, group, dtype, smaller)
        raise
    checked = (
        update if smaller == shape else capture_update(name, optimizer, group, dtype, smaller)[0]
    )
    check_update(checked, optimizer, group, dtype, smaller, steps)
    check_separate(optimizer, group, dtype, smaller)
    return update


def _with_dims(
    name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[UpdateGraph]:
    """Yield the updates of parameters with several dims, which a third-party class may treat
    differently from a vector.
    """
    if not is_torchs(optimizer):
        yield from (
            capture_update(name, optimizer, group, dtype, shape)[0]
            for shape in _FLAT_SHAPES
            if len(shape) > 1
        )
