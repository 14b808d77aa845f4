"""Cases of the coverage suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.job.definition import Job

ROWS = 4
"""Rows of an example batch. The stages run other numbers of rows."""
WIDTH = 8
TIME = 6
HEADS = 2
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One trainable model and loss, built from code with seeded weights.

    Attributes:
        name: unique name; that of the row in the table.
        family: name of its `Family`.
        build: makes the job. Called with the same seed, it makes the same job, and it imports what
            it
            needs.
        refused: why no correct capture exists, so that a freeze must reject the case; "" if it must
            be captured.
        gap: why it is not captured yet, although a correct capture exists. Such a case may be
            rejected, and may pass in the future.
        mixes_rows: a row's result depends on the other rows of its call (batch statistics, in-batch
            negatives), so that two workers with half the rows each compute the mean over the
            halves,
            like eager data-parallel training.
        stacks: how many times the rows occur in a random value whose first dim is longer than the
            batch, as with stacked views.
        note: what a reader of the table should know.
    """

    name: str
    family: str
    build: Callable[[], Job]
    refused: str = ""
    gap: str = ""
    mixes_rows: bool = False
    note: str = ""
    stacks: int = 1

    def job(self) -> Job:
        """Make the job; every call makes the same one."""
        torch.manual_seed(20_261)
        return self.build()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all cases, with one group per dtype. The suite is about gradients."""
    dtypes = dict.fromkeys(p.dtype for p in model.parameters())
    return torch.optim.SGD(
        [{"params": [p for p in model.parameters() if p.dtype is dtype]} for dtype in dtypes],
        lr=0.01,
    )


def make_job(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Callable[[nn.Module, Batch], Any] | None,
    **options: Any,
) -> Job:
    """Return the job of a case. `loss` is None if the model returns it."""
    return Job(model=model, batch=batch, loss=loss, optimizer=sgd, **options)


class Family:
    """Collects the cases of a file.

    `add(name, ...)` decorates a function that returns (model, batch, loss) or a Job; the first line
    of its docstring is the note of the case.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def add(
        self,
        name: str,
        *,
        refused: str = "",
        gap: str = "",
        mixes_rows: bool = False,
        stacks: int = 1,
    ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Register the decorated builder under `name`."""

        def register(build: Callable[[], Any]) -> Callable[[], Any]:
            note = (build.__doc__ or "").strip().splitlines()
            text = note[0] if note else ""
            self.cases.append(
                Case(
                    name,
                    self.name,
                    lambda: _as_job(build()),
                    refused,
                    gap,
                    mixes_rows,
                    text,
                    stacks,
                )
            )
            return build

        return register


def _as_job(built: Any) -> Job:
    return built if isinstance(built, Job) else make_job(*built)


class Small(nn.Module):
    """A linear layer, `middle(self, hidden)`, and another linear layer.

    The input and the output are (rows, WIDTH). Further parameters, modules and buffers are passed
    by name.
    """

    def __init__(self, middle: Callable[[Any, Tensor], Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.last(self.middle(self, self.first(x)))
        return last


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over rows of a smooth function of the output."""
    out: Tensor = model(batch["x"])
    return (out.float().square() + out.float()).flatten(1).mean(1).mean()


def small(
    middle: Callable[[Any, Tensor], Any], **parts: nn.Module | Tensor
) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) of `Small`."""
    return Small(middle, **parts), {"x": torch.randn(ROWS, WIDTH)}, mean_square


def sequences(model: nn.Module) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) over sequences (rows, TIME, WIDTH)."""
    return model, {"x": torch.randn(ROWS, TIME, WIDTH)}, mean_square


class Over(nn.Module):
    """A module whose forward is a function of (model, x); parts are passed by name."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self, x)
        return out
