"""State that an optimizer may keep between steps, and its Python numbers during capture."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.autograd_trace.optimizer.captured_updates import (
    Make,
    capture_of_the_model,
    captured,
    compare,
)
from tests.autograd_trace.optimizers import (
    Cached,
    Each,
    Estimated,
    Factors,
    Filled,
    Growing,
    Large,
    Moments,
    OfAll,
    Projected,
    Projector,
    Rateless,
    Rates,
    Ratio,
    Rounded,
    Sparse,
    Turned,
    Wrapping,
)
from tests.capture.jobs import job
from tests.optimizers import optimizer_of
from torch import Tensor, nn, optim

from trainload.autograd_trace.graphs import UpdateGraph
from trainload.autograd_trace.optimizer.state_leaves import leaves, rebuilt
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_of_the_model()


ELEMENTWISE: dict[str, Make] = {
    "moments in a dict": Moments,
    "numbers that never change": Rates,
    "an optimizer in another": lambda p: Wrapping(optim.SGD(p, lr=0.1, momentum=0.9), shared=False),
    "that share their state": lambda p: Wrapping(optim.SGD(p, lr=0.1, momentum=0.9), shared=True),
}
WHOLE: dict[str, Make] = {
    "factors in lists": Factors,
    "a projector": Projected,
    "a count of all": OfAll,
    "filled": Filled,
    "a number or a tensor": Ratio,
    "bfloat16 within": Rounded,
}


def matrices(params: Any) -> list[Any]:
    return [p for p in params if p.ndim == 2]


@functools.cache
def of_matrices(make: Make) -> UpdateGraph:
    """Return the update of the model's matrices."""
    (update,) = captured(capture_of_the_model(), lambda p: make(matrices(p)), quiet=True)[1]
    return update


@pytest.mark.matrix("moments in a dict", "numbers that never change")
@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_state_of_any_form_runs_on_slices(program: Program, make: Make) -> None:
    (update,) = captured(program, make)[1]
    assert update.elementwise
    compare(update, make, (5, 7), 1e-5)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_state_of_any_form_runs_on_whole_parameters(make: Make) -> None:
    update = of_matrices(make)
    assert update.shape == (8, 8)
    compare(update, make, (8, 8), 5e-3 if make is Rounded else 1e-4)


def test_entries_are_named_by_their_places() -> None:
    assert [(spec.name, spec.shape) for spec in of_matrices(Factors).state] == [
        ("bases-now-0", ()),
        ("bases-now-1", ()),
        ("factors-0", ()),
        ("factors-1", ()),
        ("step", ()),
    ]
    assert [spec.name for spec in of_matrices(OfAll).state] == ["optimizer-k"]


def test_a_nest_is_made_new_with_other_leaves() -> None:
    projector = Projector(2)
    state = {"a": [1, (2, {"b": None})], "p": projector}
    assert list(leaves(state)) == [
        ("a-0", 1),
        ("a-1-0", 2),
        ("a-1-1-b", None),
        ("p-rank", 2),
        ("p-basis", projector.basis),
    ]
    made = rebuilt(state, {"a-1-0": 5, "p-basis": 6})
    assert made["a"] == [1, (5, {"b": None})]
    assert (made["p"].rank, made["p"].basis) == (2, 6)
    assert projector.basis is not made["p"].basis


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Estimated, "depends on other parameters"),
        (Growing, "different entries after the first step.*add nothing later"),
        (Sparse, "size of an optimizer state depends on values"),
        (Turned, r"differ from the trained ones.*Job\.ema"),
        (Rateless, "no learning rate"),
        (Cached, "option 'group-buffer'.*got list"),
        (
            lambda p: Wrapping(optim.Adagrad(p), shared=False),
            "wraps another one that already has its own parameter groups or state",
        ),
    ],
)
def test_what_an_update_cannot_keep_is_refused(program: Program, make: Make, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(program, make)


@pytest.mark.slow
def test_a_count_that_differs_between_parameters_is_refused(program: Program) -> None:
    class Counting(Each):
        def change(
            self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
        ) -> None:
            group["k"] = group.get("k", 0) + 1
            p.sub_(gradient * group["lr"] / group["k"])

    with pytest.raises(CaptureError, match="depends on other parameters"):
        captured(program, Counting)


@pytest.mark.slow
def test_state_differs_with_the_shape_of_the_parameter(program: Program) -> None:
    updates = captured(program, Factors)[1]
    assert [(u.group, len(u.state)) for u in updates] == [("group0-8", 3), ("group0-8x8", 5)]


def test_what_a_group_of_large_parameters_does_is_tried_on_them() -> None:
    """Small parameters can be updated on slices, large ones cannot."""
    updates = []
    for size in (8, 24):
        given = job(
            nn.Linear(size, size),
            batch={"x": torch.randn(4, size)},
            loss=_loss,
            optimizer=lambda m: Large(m.parameters()),
        )
        updates.append(optimizer_of(given, capture(given))[1])
    assert [[update.shape for update in each] for each in updates] == [[None], [(24,), (24, 24)]]


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result
