"""torch.export's strict mode: when it is used, when it cannot be, and how this is recorded."""

from __future__ import annotations

import builtins
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

from trainload.capture.parity.replays import Check
from trainload.capture.program import Program
from trainload.capture.tracing.strict import export_strictly
from trainload.capture.tracing.targets import example_of, targets_of
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.freezing import prove as proving
from trainload.freezing.prove import prove

pytestmark = pytest.mark.slow

Middle = Callable[[Any, Tensor], Tensor]


def flat(_: Any, x: Tensor) -> Tensor:
    """Reshape by a `len` that does not go through the model's own name.

    It is a plain number in the non-strict mode, and a size in the strict one.
    """
    return x.reshape(builtins.len(x), -1)


def through_numpy(_: Any, x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.tanh(x.detach().numpy()))


def modes(program: Program) -> dict[str, str]:
    return {
        name: graph.tracing.mode
        for name, graph in program.graphs.items()
        if graph.tracing is not None
    }


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize(
    "middle",
    [
        flat,
        through_numpy,
        lambda _, x: x * float(builtins.len(x) // 2),
        lambda _, x: x + torch.arange(builtins.len(x)).unsqueeze(1),
        lambda _, x: x.sum(0, keepdim=True).expand(builtins.len(x), -1),
        lambda model, x: nn.functional.dropout(
            x.reshape(builtins.len(x), -1), 0.25, model.training
        ),
    ],
    ids=["len", "numpy", "half of len", "arange", "expand", "dropout"],
)
def test_the_strict_mode_steps_in_where_the_other_cannot_follow(middle: Middle) -> None:
    assert modes(capture(job(Model(middle)))) == {"train": "strict", "eval": "strict"}


@pytest.mark.parametrize("middle", [flat, through_numpy])
def test_a_strict_graph_is_derived_and_right_on_every_number_of_rows(middle: Middle) -> None:
    assert (
        str(prove(job(Model(middle)), Check.THOROUGH).program.graphs["train"].guard)
        == "x float32[batch, 8]"
    )


def test_the_other_mode_is_taken_first() -> None:
    assert modes(capture(job(Model()))) == {"train": "non-strict", "eval": "non-strict"}


def test_only_the_graph_that_needs_it_is_strict() -> None:
    assert modes(capture(job(Model(lambda model, x: flat(model, x) if model.training else x)))) == {
        "train": "strict",
        "eval": "non-strict",
    }


def test_why_is_written_down_with_the_line() -> None:
    tracing = capture(job(Model(flat))).graphs["train"].tracing
    assert tracing is not None
    assert "only one size in this model" in tracing.why
    assert "test_strict.py:" in tracing.why


def test_no_strict_gives_the_page() -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(flat)), strict=False)
    assert raised.value.findings[0].cause == "specialised-dim"
    assert notes(raised.value) == ""


def test_strict_alone_takes_what_both_could() -> None:
    assert modes(capture(job(Model(lambda _, x: x.tanh())), strict=True)) == {
        "train": "strict",
        "eval": "strict",
    }


# Losses in the strict mode


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


def hooked(model: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]  # torch's
    return flat(model, x)


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return flat(model, x) - mean


def low(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ model.first.weight
    return flat(model, y.float())


def assigned(model: Any, x: Tensor) -> Tensor:
    model.seen = model.seen + 1
    return flat(model, x)


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return flat(model, x)


def kept(model: Any, x: Tensor) -> Tensor:
    model.last_seen = x.mean()
    return flat(model, x)


def saved(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return flat(model, x.tanh())


LOST: dict[str, tuple[Middle, str]] = {
    "autograd function": (
        lambda model, x: Doubled.apply(flat(model, x)),  # type: ignore[no-untyped-call]
        "autograd function Doubled",
    ),
    "tensor hook": (hooked, "uses autograd directly"),
    "no_grad": (without_gradient, "changes the grad mode"),
    "autocast": (low, r"a region \(autocast\)"),
    "checkpoint": (
        lambda model, x: checkpoint(torch.tanh, flat(model, x), use_reentrant=False),
        r"\(checkpoint\)",
    ),
    "saved tensors": (saved, "save_on_cpu"),
    "vmap": (lambda model, x: torch.func.vmap(torch.tanh)(flat(model, x)), r"\(vmap\)"),
    "gradient inside": (
        lambda model, x: torch.func.grad(lambda t: t.square().sum())(flat(model, x)),
        r"\(func grad\)",
    ),
    "assigned buffer": (assigned, "a new tensor to the buffer seen"),
    "counter": (counted, "Python attribute"),
    "random": (lambda model, x: flat(model, x) * random.random(), "random.random"),
}


@pytest.mark.parametrize(("middle", "said"), LOST.values(), ids=LOST)
def test_what_would_be_lost_is_named(middle: Middle, said: str) -> None:
    with pytest.raises(CaptureError, match=f"strict mode would lose part of the model: .*{said}"):
        capture(job(Model(middle, seen=torch.zeros(()))), strict=True)


@pytest.mark.parametrize(
    "middle", [*(middle for middle, _ in LOST.values()), kept], ids=[*LOST, "assigned attribute"]
)
def test_what_would_be_lost_leaves_the_page_as_it_was(middle: Middle) -> None:
    pages = []
    for strict in (False, None):
        with pytest.raises(CaptureError) as raised:
            capture(job(Model(middle, seen=torch.zeros(()))), strict=strict)
        pages.append(str(raised.value))
    assert pages[0] == pages[1]


def test_what_is_called_where_garbage_is_collected_is_not_the_models() -> None:
    asked: list[float] = []

    def ask(phase: str, info: dict[str, int]) -> None:
        asked.append(time.perf_counter())

    def littering(_: Any, x: Tensor) -> Tensor:
        litter = [[number] for number in range(5000)]
        return x * len(litter)

    thresholds = gc.get_threshold()
    gc.set_threshold(700)  # Python's default; that of the test suite is higher
    gc.callbacks.append(ask)
    try:
        littering(None, torch.ones(1))
        assert asked
        assert modes(capture(job(Model(littering)), strict=True)) == {
            "train": "strict",
            "eval": "strict",
        }
    finally:
        gc.callbacks.remove(ask)
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


def test_a_module_hook_speaks_against_it() -> None:
    model = Model(flat)
    model.first.register_forward_hook(lambda _, __, output: output * 2)
    with pytest.raises(CaptureError, match="module first has a hook"):
        capture(job(model), strict=True)


def test_a_parameter_hook_speaks_against_it() -> None:
    model = Model(flat)
    model.first.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]  # torch's
    with pytest.raises(CaptureError, match=r"parameter first\.weight has a hook"):
        capture(job(model), strict=True)


# Results


@pytest.mark.parametrize(
    "middle",
    [
        lambda _, x: x.relu() if x.sum() > 0 else x,
        lambda _, x: x[: int(x.sum().abs()) + 1].mean(0) + x,
    ],
    ids=["branch", "number"],
)
def test_it_is_not_tried_for_values_of_the_batch(middle: Middle) -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(middle)))
    assert notes(raised.value) == ""


def test_a_branch_on_the_number_of_rows_is_refused() -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda _, x: x.relu() if builtins.len(x) > 2 else x)))
    assert "strict mode was tried too" in notes(raised.value)


def test_a_number_read_by_numpy_is_refused() -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda _, x: x * float(x.detach().numpy()[0, 0]))))
    assert "reads a number from a tensor" in notes(raised.value)


def test_a_condition_on_a_declared_size_is_refused() -> None:
    with pytest.raises(CaptureError) as raised:
        capture(
            job(
                Model(lambda _, x: x + x[: x.shape[0] - 2].sum()),
                dynamic={"x": {0: Dim("batch", min=3)}},
            )
        )
    assert "of a declared size" in notes(raised.value)


def test_conditions_on_other_sizes_are_in_the_guard() -> None:
    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            y = x.view(builtins.len(x), -1)
            return (y * 2 if x.shape[1] % 2 == 0 and x.shape[1] <= 20 else y) * self.gain

    guard = (
        prove(job(Even(), dynamic={"x": {1: Dim.AUTO}}), Check.USUAL).program.graphs["train"].guard
    )
    assert str(guard) == "x float32[batch, x_1]; x_1 2 to 20; (x_1 % 2) == 0"


def test_inputs_share_the_batch_dim() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.reshape(builtins.len(x), -1).sum(1) * self.gain + y.sum(1)

    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    captured = capture(
        job(
            Pair(),
            batch=batch,
            loss=lambda m, b: m(**b).mean(),
            dynamic={"x": {1: Dim("left")}, "y": {1: Dim("right")}},
        )
    )
    assert [spec.shape for spec in captured.graphs["train"].inputs] == [
        ("batch", "x_1"),
        ("batch", "y_1"),
    ]


def test_tied_parameters_keep_their_owner() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.other(self.one(x)).reshape(builtins.len(x), -1)
            return y

    program = prove(job(Tied()), Check.USUAL).program
    assert program.aliases == {"other.weight": "one.weight"}


def test_nodes_know_their_module_and_their_line() -> None:
    graph = capture(job(Model(flat))).graphs["train"].exported.graph
    (reshape,) = [node for node in graph.nodes if node.target is torch.ops.aten.reshape.default]
    linear = next(node for node in graph.nodes if node.target is torch.ops.aten.linear.default)
    assert "test_strict.py" in str(reshape.meta["stack_trace"]).strip().splitlines()[-3]
    assert [path for path, _ in linear.meta["nn_module_stack"].values()][-1] == "model.first"


def test_a_trained_tensor_outside_the_model_is_refused() -> None:
    outside = torch.randn(8, requires_grad=True)
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda model, x: flat(model, x) * outside)))
    assert raised.value.findings[0].cause == "specialised-dim"


def test_many_jobs_of_one_process_are_captured() -> None:
    """There are more jobs than versions that torch compiles of one function."""
    for _ in range(10):
        target = targets_of(job(Model(flat)))[0]
        assert export_strictly(
            target, *example_of(job(Model(flat)), target)
        ).graph_signature.user_inputs == ("batch_x",)


def test_the_model_is_as_it_was() -> None:
    model = Model(flat, seen=torch.zeros(()))
    before = {
        name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()
    }
    capture(job(model))
    after = {name: (id(value), value) for name, value in model.state_dict(keep_vars=True).items()}
    assert all(
        before[name][0] == after[name][0] and torch.equal(before[name][1], after[name][1])
        for name in before
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    capture(job(Model(flat)))
    with pytest.raises(CaptureError):
        capture(job(Model(lambda _, x: x.relu() if builtins.len(x) > 2 else x)))
    assert capfd.readouterr() == ("", "")


def test_a_joint_graph_that_is_wrong_gives_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise CaptureError("another gradient")

    monkeypatch.setattr(proving, "check_step", wrong)
    with pytest.raises(CaptureError) as raised:
        prove(job(Model(flat)), Check.USUAL)
    assert raised.value.findings[0].cause == "specialised-dim"
    assert "another gradient" in notes(raised.value)


def test_a_joint_graph_that_is_wrong_is_told_of_where_strict_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*_: object) -> None:
        raise CaptureError("another gradient")

    monkeypatch.setattr(proving, "check_step", wrong)
    with pytest.raises(CaptureError, match="another gradient"):
        prove(job(Model(flat)), Check.USUAL, strict=True)
