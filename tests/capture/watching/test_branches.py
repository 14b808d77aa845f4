"""Branches of torch.cond that write to buffers.

torch rejects them in training. The reference takes the branch in Python.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.coverage.eager import cond_of_python
from tests.trained import UPDATES, assert_trains_as_eager
from torch import Tensor, nn

import trainload
from trainload.capture.source.patched import replaced
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.launching.run.journal import read_events

ROWS = 4
Middle = Callable[[Any, Tensor], Tensor]


class Branching(nn.Module):
    """A layer, then the function to test. One branch is taken in every second call."""

    calls: Tensor

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.middle = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, affine=False),
            middle,
        )
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.middle(self, self.layer(x))
        self.calls += 1
        return found


def branch(
    m: Any, x: Tensor, one: Callable[..., Any], other: Callable[..., Any], *operands: Tensor
) -> Any:
    return torch.cond(m.calls % 2 == 0, one, other, (x, *operands))


def batch_norm(m: Any, x: Tensor) -> Tensor:
    found: Tensor = branch(m, x, m.norm, lambda y: y * 1)
    return found


def in_place(m: Any, x: Tensor) -> Tensor:
    def counted(y: Tensor) -> Any:
        m.seen.add_(y.detach().mean(0))
        m.count += 1
        return y * m.seen

    found: Tensor = branch(m, x, counted, m.layer)  # two parameters of one bucket
    return found


def assigned(m: Any, x: Tensor) -> Tensor:
    def averaged(y: Tensor) -> Any:
        m.seen = 0.9 * m.seen + 0.1 * y.detach().mean(0)
        return y - m.seen

    found: Tensor = branch(m, x, lambda y: y * m.seen.exp(), averaged)
    return found


def operand(m: Any, x: Tensor) -> Tensor:
    def counted(y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        seen.mul_(0.5).add_(y.detach().amax(0))
        return y * seen, torch.ones((), dtype=torch.int64)

    value, taken = branch(
        m, x, counted, lambda y, _: (y.sin(), torch.zeros((), dtype=torch.int64)), m.seen
    )
    m.count += taken
    found: Tensor = value
    return found


def nested(m: Any, x: Tensor) -> Tensor:
    found: Tensor = branch(
        m,
        x,
        lambda y: torch.cond(y.amax() > -100, m.norm, lambda z: z * 1, (y,)),
        lambda y: y.tanh(),
    )
    return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]) - 1).square().mean()
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def job(middle: Middle) -> trainload.Job:
    example = {"x": torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))}
    return trainload.Job(
        Branching(middle), example, sgd, loss=loss, steps=UPDATES, global_batch=ROWS
    )


def of_python(job: trainload.Job, step: int, rows: int) -> AbstractContextManager[None]:
    return replaced(torch, "cond", cond_of_python)


@pytest.mark.matrix(when=lambda middle, compiled: middle is batch_norm and not compiled)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("middle", [batch_norm, in_place, assigned, operand, nested])
def test_a_branch_that_writes_to_buffers_trains_as_pythons_own(
    middle: Middle, compiled: bool, tmp_path: Path
) -> None:
    data = {"x": torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))}
    assert_trains_as_eager(job(middle), data, tmp_path, draws=of_python, compile=compiled)
    # for example of a graph that is interpreted
    assert not [event for event in read_events(tmp_path / "run") if event.kind == "warning"]


def test_what_only_the_branch_uses_that_the_example_does_not_take_is_trained(
    tmp_path: Path,
) -> None:
    model = Branching(
        lambda m, x: torch.cond(m.calls > 3, lambda y: m.affine(y), lambda y: y * 1, (x,))
    )
    model.affine = nn.BatchNorm1d(8)
    example = {"x": torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))}
    given = trainload.Job(model, example, sgd, loss=loss, steps=UPDATES, global_batch=ROWS)
    late = trainload.Job(
        copy.deepcopy(model), example, sgd, loss=loss, steps=UPDATES, global_batch=ROWS
    )
    assert all(parameter.trainable for parameter in capture(given).parameters)
    late.model.get_buffer("calls").add_(2)  # the branch is taken from the third update on
    assert_trains_as_eager(late, example, tmp_path, draws=of_python)


@pytest.mark.parametrize(
    "part", [lambda z: z[:2], lambda z: z.split(4, 1)[0]], ids=["a slice", "one of several views"]
)
def test_a_branch_that_writes_to_another_tensor_is_refused_at_its_line(
    part: Callable[[Tensor], Tensor],
) -> None:
    def middle(m: Any, x: Tensor) -> Tensor:
        def written(y: Tensor, z: Tensor) -> Tensor:
            part(z).mul_(2)
            return y * z

        found: Tensor = branch(m, x, written, lambda y, z: y + z, x.detach() * 2)
        return found

    with pytest.raises(CaptureError, match=r"(?s)test_branches\.py.*branch"):
        capture(job(middle))
