"""Capture of the cases in torch's own collection of what its export supports."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from packaging.version import Version
from tests.capture.jobs import Batch
from torch import Tensor, nn
from torch._export.db.examples import all_examples  # private, but the only access to the cases
from torch.utils._pytree import tree_leaves

from trainload.capture.job.definition import Job
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.core.finding import LINES


class Trained(nn.Module):
    """A case with a trainable parameter: the mean of its outputs, scaled."""

    def __init__(self, case: nn.Module) -> None:
        super().__init__()
        self.case = case
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, *inputs: Tensor) -> Tensor:
        parts = [
            torch.as_tensor(part).float().mean()
            for part in tree_leaves(self.case(*inputs))
            if isinstance(part, Tensor | int | float)
        ]
        return torch.stack(parts).sum() * self.gain


def fits(case: Any) -> bool:
    """Return whether a case's inputs can be a batch: tensors with the same leading size."""
    inputs = case.example_args
    return (
        not case.example_kwargs
        and all(isinstance(i, Tensor) and i.ndim for i in inputs)
        and len({i.shape[0] for i in inputs}) == 1
    )


EVERY: dict[str, Any] = all_examples()  # type: ignore[no-untyped-call]  # torch's own
CASES = {name: case for name, case in sorted(EVERY.items()) if fits(case)}


def captured(case: Any) -> CaptureError | None:
    """Return the error that a capture of the case raises, or None."""
    names = [f"input_{n}" for n in range(len(case.example_args))]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model(*(batch[name] for name in names))
        return value

    batch = dict(zip(names, (value.clone() for value in case.example_args), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            capture(
                Job(
                    Trained(case.model),
                    batch,
                    lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                    loss,
                )
            )
        except CaptureError as error:
            return error
    return None


@pytest.mark.matrix(when=lambda name: list(CASES).index(name) % 8 == 0)
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_captured_or_explained(name: str) -> None:
    error = captured(CASES[name])
    if error is not None:
        assert error.findings
        assert len(str(error).splitlines()) <= LINES


def test_what_torch_does_not_support_is_refused() -> None:
    unsupported = {
        name: case for name, case in CASES.items() if case.support_level.name != "SUPPORTED"
    }
    if Version(torch.__version__).release < (2, 12):
        unsupported.pop("unsupported_operator")  # it is captured, here as in later releases
    assert set(unsupported) == {"dynamic_shape_round"}
    assert [name for name, case in unsupported.items() if captured(case) is None] == []
