"""A package stores tensors contiguously, regardless of the strides in the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trained import assert_trains_as_eager
from torch import Tensor, nn, optim

from trainload import CaptureError, Job
from trainload.capture.tracing.trace import capture


class Model(nn.Module):
    """Has a transposed weight, every second column of another one, and a transposed buffer.

    Two of them are flattened by `view`, which only their strides allow.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.layer.weight = nn.Parameter(torch.randn(4, 4).t())
        self.columns = nn.Parameter(torch.randn(4, 8)[:, ::2])
        self.table: Tensor
        self.register_buffer("table", torch.randn(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        flat = self.layer.weight.t().view(-1)
        loss: Tensor = (self.layer(x) @ self.columns).square().mean() + (
            flat * self.table.t().view(-1)[:16]
        ).sum()
        return loss


class Strides(Model):
    def forward(self, x: Tensor) -> Tensor:
        first_column = self.layer.weight.as_strided((4,), (1,))
        loss: Tensor = self.layer(x).square().mean() + first_column.sum()
        return loss


def job(model: nn.Module) -> Job:
    generator = torch.Generator().manual_seed(1)
    return Job(
        model,
        {"x": torch.randn(8, 4, generator=generator)},
        lambda m: optim.SGD(m.parameters(), lr=0.01),
    )


def test_a_model_of_transposed_and_strided_tensors_trains(tmp_path: Path) -> None:
    assert_trains_as_eager(
        job(Model()),
        {"x": torch.randn(32, 4, generator=torch.Generator().manual_seed(2))},
        tmp_path,
    )


def test_as_strided_of_a_transposed_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)differs from eager mode in its loss.*as_strided"):
        capture(job(Strides()))


def test_a_backward_that_fails_in_eager_mode_too_is_told_as_that() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x).exp()
            loss: Tensor = (hidden.add_(1.0) * hidden).mean()
            return loss

    with pytest.raises(
        CaptureError, match=r"The model fails on Job\.batch in eager mode, before any capture"
    ):
        capture(job(Fails()))
