"""Loops with a gradient survive packaging, although torch restricts symbols that no size has.

The reference is torch's own while_loop in eager mode. Its gradient of values that the body closes
over differs from that of a Python loop (torch 2.13: norm 0.178 instead of 0.210, for three rounds
of a linear layer).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainload
from trainload.launching.run.journal import losses, read_events

ROWS, STEPS = 4, 3


class OneLayer(nn.Module):
    """A layer with the same initial values in every instance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)


class Rounds(OneLayer):
    """Three rounds through the layer."""

    def forward(self, x: Tensor) -> Tensor:
        loop: Any = torch.while_loop
        found: Tensor = loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, self.layer(t).tanh()), (torch.tensor(0), x)
        )[1]
        return found


class Until(OneLayer):
    """Halves the layer's output until it is small: the number of rounds depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        loop: Any = torch.while_loop
        halved: Tensor = loop(lambda t: t.abs().sum() > 3, lambda t: (t * 0.5,), (self.layer(x),))[
            0
        ]
        return halved


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# The tracer of the eager operator reads `.grad`.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.matrix(when=lambda kind, compiled: kind is Rounds and not compiled)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Rounds, Until])
def test_it_is_frozen_opened_and_trained_as_in_eager(
    tmp_path: Path, kind: type[nn.Module], compiled: bool
) -> None:
    x = np.random.default_rng(0).standard_normal((1, 4), dtype=np.float32).repeat(ROWS * STEPS, 0)
    np.savez(tmp_path / "rows.npz", x=x)
    generator = torch.Generator().manual_seed(1)
    job = trainload.Job(
        kind(),
        {"x": torch.randn(ROWS, 4, generator=generator)},
        sgd,
        loss=loss,
        steps=STEPS,
        global_batch=ROWS,
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package,
        plan,
        tmp_path / "rows.npz",
        run_dir=tmp_path / "run",
        backend="local",
        compile=compiled,
    )
    model, expected = kind(), []
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, {"x": torch.from_numpy(x[:ROWS])})
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        expected.append(value.item())
    assert losses(read_events(tmp_path / "run")) == pytest.approx(expected, rel=1e-5)
