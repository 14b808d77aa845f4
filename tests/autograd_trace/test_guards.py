"""Guards agree with torch on sizes."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import sgd
from torch import Tensor, nn
from torch.export import Dim

from trainload.autograd_trace.derivation.torch_guards import with_guards
from trainload.capture.guard import FixedValue, Guard
from trainload.capture.guards.dispatch import Dispatcher
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.capture.tracing.targets import example_of, targets_of
from trainload.capture.tracing.trace import capture
from trainload.core.errors import DataError

Function = Callable[..., Tensor]
AUTO = Dim.AUTO


class Scaled(nn.Module):
    """A loss that is a function of the batch, times a parameter."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, **batch: Any) -> Tensor:
        return self.function(**batch).float() * self.scale


def guarded(function: Function, batch: dict[str, Any], **options: Any) -> Program:
    job = Job(model=Scaled(function), batch=batch, optimizer=sgd, **options)
    targets = targets_of(job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = capture(job)
    return with_guards(
        program, targets, {target.name: example_of(job, target)[0] for target in targets}
    )


def guard_of(program: Program, graph: str = "train") -> Guard:
    guard = program.graphs[graph].guard
    assert guard is not None
    return guard


def halves(y: Tensor) -> Tensor:
    middle = y.shape[1] // 2
    return (y[:, :middle] + y[:, middle:]).mean()


def patches(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] // 4, 4).mean()


CASES: dict[str, tuple[Function, dict[str, Tensor], dict[str, Any]]] = {
    "any": (lambda x: x.mean(), {"x": torch.randn(4, 8)}, {"x": {1: AUTO}}),
    "most": (
        lambda x: (x + torch.ones(6)[: x.shape[1]]).mean(),
        {"x": torch.randn(4, 5)},
        {"x": {1: AUTO}},
    ),
    "even": (halves, {"y": torch.randn(4, 8)}, {"y": {1: AUTO}}),
    "fours": (patches, {"x": torch.randn(4, 8)}, {"x": {1: AUTO}}),
    "one": (
        lambda x: x.mean() if x.shape[1] == 5 else x.sum(),
        {"x": torch.randn(4, 5)},
        {"x": {1: AUTO}},
    ),
    "not one": (
        lambda x: x.mean() if x.shape[1] == 5 else x.sum(),
        {"x": torch.randn(4, 6)},
        {"x": {1: AUTO}},
    ),
    "alike": (
        lambda x, y: (x + y).mean(),
        {"x": torch.randn(4, 5), "y": torch.randn(4, 5)},
        {"x": {1: AUTO}, "y": {1: AUTO}},
    ),
    "double": (
        lambda x, y: (torch.cat([x, x], 1) + y).mean(),
        {"x": torch.randn(4, 3), "y": torch.randn(4, 6)},
        {"x": {1: AUTO}, "y": {1: AUTO}},
    ),
    "less": (
        lambda x, y: x.mean() if x.shape[1] < y.shape[1] else y.mean(),
        {"x": torch.randn(4, 3), "y": torch.randn(4, 5)},
        {"x": {1: AUTO}, "y": {1: AUTO}},
    ),
    "product": (
        lambda x, y: x.mean() if x.shape[1] * y.shape[1] > 20 else y.sum(),
        {"x": torch.randn(4, 5), "y": torch.randn(4, 6)},
        {"x": {1: AUTO}, "y": {1: AUTO}},
    ),
}


@functools.cache
def guarded_case(name: str) -> Program:
    function, batch, dynamic = CASES[name]
    return guarded(function, batch, dynamic=dynamic)


@pytest.mark.matrix("any", "most", "even", "one", "alike", "double", "less")
@pytest.mark.parametrize("name", CASES)
def test_a_guard_takes_the_sizes_that_torch_takes(name: str) -> None:
    batch, program = CASES[name][1], guarded_case(name)
    exported = program.graphs["train"].exported
    dispatcher = Dispatcher("train", {"": [guard_of(program)]})
    torchs = exported.module(check_guards=True)
    seen = set()
    for lengths in itertools.product(range(2, 10), repeat=len(batch)):
        tried = {name: torch.randn(3, length) for name, length in zip(batch, lengths, strict=True)}
        try:
            torchs(tried)
            fits = True
        except (AssertionError, RuntimeError):
            fits = False
        assert takes(dispatcher, tried) == fits, lengths
        seen.add(fits)
    assert True in seen
    assert (False in seen) == (name != "any")


def takes(dispatcher: Dispatcher, batch: dict[str, Tensor]) -> bool:
    try:
        dispatcher.pick(batch)
    except DataError:
        return False
    return True


def test_a_size_that_follows_from_another_is_an_expression_of_it() -> None:
    x, y = guard_of(guarded_case("double")).inputs
    assert (x.sizes, y.sizes) == (("batch", "x_1"), ("batch", "2*x_1"))


def test_a_size_that_follows_from_a_dim_which_no_input_has_is_solved() -> None:
    half = Dim("half", min=2, max=4)
    program = guarded(lambda y: y.mean(), {"y": torch.randn(4, 6)}, dynamic={"y": {1: 2 * half}})
    dispatcher = Dispatcher("train", {"": [guard_of(program)]})
    assert [
        length for length in range(2, 12) if takes(dispatcher, {"y": torch.randn(3, length)})
    ] == [4, 6, 8]


def test_a_declared_range_is_the_guards() -> None:
    program = guarded(
        lambda x: x.mean(),
        {"x": torch.randn(4, 6)},
        dynamic={"x": {0: Dim("rows", min=2, max=9), 1: Dim("length", max=64)}},
    )
    assert guard_of(program).ranges == {"batch": (2, 9), "x_1": (0, 64)}


def test_constants_are_kept_by_kind_and_text() -> None:
    batch = {
        "x": torch.randn(4, 6),
        "flag": True,
        "task": "a",
        "scale": 0.5,
        "count": 1,
        "nothing": None,
    }
    guard = guard_of(guarded(lambda x, **_: x.mean(), batch))
    assert guard.constants == {
        "count": FixedValue("int", "1"),
        "flag": FixedValue("bool", "True"),
        "nothing": FixedValue("none", ""),
        "scale": FixedValue("float", "0.5"),
        "task": FixedValue("str", "a"),
    }


def test_what_another_variant_has_is_absent() -> None:
    x = torch.randn(4, 6)
    program = guarded(
        lambda x, mask=None: (x if mask is None else x * mask).mean(),
        {"x": x},
        variants={"masked": {"x": x, "mask": x}},
    )
    assert guard_of(program).absent == ("mask",)
    assert guard_of(program, "train-masked").absent == ()


def test_what_the_predict_graph_does_not_read_is_not_absent_from_it() -> None:
    x = torch.randn(4, 6)
    program = guarded(
        lambda x, y=None: x.mean() if y is None else (x - y).square().mean(),
        {"x": x},
        variants={"labelled": {"x": x, "y": x}},
        predict=lambda model, batch: model(x=batch["x"]),
        predict_inputs=["x"],
    )
    assert guard_of(program, "predict").absent == ()


def test_what_the_sizes_say_already_is_no_condition() -> None:
    for name in ("any", "most", "one", "alike", "double"):
        assert guard_of(guarded_case(name)).conditions == ()


def test_a_condition_outside_the_grammar_narrows_the_guard_to_the_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "math.sqrt(L['batch']['x'].size()[1]) > 2 + 0*L['batch']['x'].size()[0]"
    monkeypatch.setattr(
        "trainload.autograd_trace.derivation.torch_guards.size_conditions", lambda exported: [code]
    )
    guard = guard_of(
        guarded(lambda x: x.mean(), {"x": torch.randn(4, 8)}, dynamic={"x": {1: AUTO}})
    )
    assert guard.ranges == {"batch": (1, None), "x_1": (8, 8)}
