"""A training step in eager PyTorch from the case's own source, the reference of all comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tests.coverage.case import Case
from tests.coverage.models.masks import StatelessDraws
from torch import Tensor
from torch.export import Dim

from trainload.capture.job.definition import Job, Loss
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.job.leading_rows import arranged
from trainload.capture.source.patched import replaced

SEED = 7
STEP = 3
ROW = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A loss with its weight, the gradients, and the buffers after the step.

    The loss is a mean with this weight; gradients are those of the mean, by parameter.
    """

    loss: Tensor
    weight: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random: bool


def resized(batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return the batch with `rows` rows, by repeating its own."""
    return {
        name: value[torch.arange(rows) % value.shape[0]].clone() for name, value in batch.items()
    }


def is_static(job: Job) -> bool:
    """Return whether the job fixes its number of rows."""
    return any(dims.get(0) is Dim.STATIC for dims in job.dynamic.values())


def eager_step(case: Case, rows: int) -> Step:
    """Run one step of a new model on `rows` rows.

    If it draws random numbers, they are those that a step graph would draw.
    """
    state = torch.random.get_rng_state()
    # Eager's own control-flow operators compile. A version that was compiled for other rows does
    # not know the mode below.
    torch.compiler.reset()
    step = _step(case, rows, None)
    if step.random:
        static = is_static(case.job())
        step = _step(
            case, rows, StatelessDraws(SEED, STEP, ROW, rows, static=static, stacks=case.stacks)
        )
    torch.random.set_rng_state(state)
    return step


def _step(case: Case, rows: int, draws: StatelessDraws | None) -> Step:
    job = arranged(case.job())
    model = job.model.train()
    batch = resized(leaves_of(job.batch), rows)
    # As in a captured graph. The cache alone changes bf16 gradients by 1e-3.
    torch.set_autocast_cache_enabled(False)
    before = torch.random.get_rng_state()
    try:
        with (
            draws or nullcontext(),
            replaced(torch, "cond", cond_of_python if draws is None else draws.cond),
        ):
            loss, weight = _forward_backward(job, batch, rows)
    finally:
        torch.set_autocast_cache_enabled(True)
    return Step(
        loss=loss.detach(),
        weight=weight,
        gradients={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        buffers={
            name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)
        },
        random=not torch.equal(before, torch.random.get_rng_state()),
    )


def cond_of_python(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """Compute torch.cond as its documentation defines it.

    torch's own rejects branches that write to buffers in training.
    """
    return (true_fn if pred else false_fn)(*operands)


def _forward_backward(job: Job, batch: dict[str, Tensor], rows: int) -> tuple[Tensor, float]:
    nested = rebuild(job.batch, batch)
    result = job.model(**nested) if job.loss is None else job.loss(job.model, nested)
    loss = result if isinstance(result, Loss) else Loss(result)
    loss.value.backward()  # type: ignore[no-untyped-call]  # torch's
    return loss.value, float(rows if loss.weight is None else loss.weight)
