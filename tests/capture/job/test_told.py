"""Error messages name the user's own code and its replacement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.jobs import job
from torch import Tensor, nn, optim

from trainload.autograd_trace.optimizer.capture_optimizer import capture_optimizer
from trainload.autograd_trace.optimizer.trainers import make_optimizers
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, raised


class Listed(nn.Module):
    """Also reads a parameter from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.all = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for weight in self.all:
            y = y + x @ weight.T
        return y


def test_a_list_of_parameters_leads_to_a_parameter_list() -> None:
    with pytest.raises(
        CaptureError, match=r"Use model\.first\.weight itself there.*nn\.ParameterList"
    ):
        capture(job(Listed()))


class Unregistered(nn.Module):
    """Its parameters are in a list, where no optimizer finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.weights = [nn.Parameter(torch.ones(8))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0]


@pytest.mark.filterwarnings("ignore:2 parameters get no gradient")
def test_a_list_of_parameters_that_no_module_has_leads_to_a_parameter_list() -> None:
    with pytest.raises(
        CaptureError,
        match=(
            r"(?s)no gradient reaches any parameter.*parameters in a Python list.*nn\.ParameterList"
        ),
    ):
        capture(job(Unregistered()))


class Quantised(nn.Module):
    """Has a frozen parameter of another dtype, such as an integer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.first.scale = nn.Parameter(torch.ones(8, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) * self.first.scale
        return y


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_a_parameter_of_no_floating_point_is_named_at_the_freeze(dtype: torch.dtype) -> None:
    with pytest.raises(
        CaptureError,
        match=(
            r"first\.scale: the parameter does not have a floating-point"
            r" dtype.*first\.register_buffer\('scale'"
        ),
    ):
        capture(job(Quantised(dtype)))


class Repeated(optim.SGD):
    """Takes as many steps as the value of its learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for _ in range(int(self.param_groups[0]["lr"])):
            super().step()


def test_a_learning_rate_that_may_be_no_tensor_is_named() -> None:
    given = job(nn.Linear(8, 8), optimizer=lambda m: Repeated(m.parameters(), lr=torch.tensor(2.0)))
    optimizers = make_optimizers(given)
    with pytest.raises(
        CaptureError, match="Pass lr as a number: Repeated converts a tensor to a number"
    ):
        capture_optimizer(given, capture(given), optimizers)


class Transformed(nn.Module):
    """Computes a jvp of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def tangent(row: Tensor) -> Tensor:
            found: Tensor = torch.func.jvp(
                lambda t: self.first(t).sin(), (row,), (torch.ones_like(row),)
            )[1]
            return found

        mapped: Tensor = torch.func.vmap(tangent)(x)
        return mapped


def test_a_transform_inside_of_another_is_told_as_that() -> None:
    with pytest.raises(
        CaptureError,
        match=(
            r"(?s)a torch\.func transform is nested in another one.*Apply the inner transform to"
            r" all rows"
        ),
    ):
        capture(job(Transformed()))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("\n  two sizes differ \nhere"), "ValueError: two sizes differ"),
        (AssertionError(), "AssertionError"),
        (OSError("\n"), "OSError"),
    ],
    ids=["several lines", "no text", "an empty line"],
)
def test_what_was_raised_is_told_in_one_line(error: Exception, told: str) -> None:
    assert raised(error) == told
