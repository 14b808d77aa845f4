"""Rare forms of autograd functions, hooks and modules are captured with eager's gradients.

They can also be derived.
"""

# mypy: allow-untyped-calls
# torch's apply and register_hook have no types.
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from tests.capture.regions import Scaled, linear
from tests.capture.watching.test_regions import targets
from tests.coverage.models.functions import InPlace, Recomputed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError

Middle = Callable[[Any, Tensor], Any]


class Lost(torch.autograd.Function):
    """Marks a tensor as dirty, but does not return it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2).sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Asking(torch.autograd.Function):
    """Has three outputs. Its backward needs the first one's gradient, and checks for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * 2, x * w, x + 1

    @staticmethod
    def backward(
        ctx: Any, first: Tensor, second: Tensor | None, third: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x, w = ctx.saved_tensors
        by_x = first * 5 + (11 if second is None else second * w) + (13 if third is None else third)
        return by_x, None if second is None else (second * x).sum(0)


class Five(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x * i for i in range(5))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor:
        return next(g for g in gradients if g is not None)


class Mapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = gradient * x.exp()
        return result


def written(_: Any, x: Tensor) -> Any:
    y = x.clone()
    InPlace.apply(y)
    return y + x


def written_in_a_checkpoint(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda t: InPlace.apply(m.part(t)), x, use_reentrant=False)


def asked(*used: int) -> Middle:
    def middle(m: Any, x: Tensor) -> Any:
        outputs = Asking.apply(x, m.part.bias)
        return sum((outputs[i].sin() for i in used), x) + m.part(x)

    return middle


def hooked_twice(_: Any, x: Tensor) -> Any:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: g + 1)
        y.register_hook(lambda g: g * 2)
    return y


def hook_removed(_: Any, x: Tensor) -> Any:
    if x.requires_grad:
        with x.register_hook(lambda g: g * 3):
            pass
    return x.sin()


def hook_that_converts(_: Any, x: Tensor) -> Any:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: g * x.to(g.dtype).contiguous())
    return y * x


def packed(_: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(), torch.from_numpy
    ):
        return x.tanh()


def gradient_in_evaluation(_: Any, x: Tensor) -> Any:
    return torch.func.grad(lambda t: Mapped.apply(t).sum())(x.detach()) * x


def affine(m: Any, x: Tensor) -> Any:
    grid = functional.affine_grid(
        m.theta(x).view(-1, 2, 3), [x.shape[0], 1, 2, 4], align_corners=False
    )
    return functional.grid_sample(x.view(-1, 1, 2, 4), grid, align_corners=False).flatten(1)


FORMS: dict[str, Callable[[], nn.Module]] = {
    "written": lambda: Model(written),
    "written in a checkpoint": lambda: Model(written_in_a_checkpoint, **linear()),
    "first output used": lambda: Model(asked(0), **linear()),
    "two outputs used": lambda: Model(asked(0, 1), **linear()),
    "all outputs used": lambda: Model(asked(0, 1, 2), **linear()),
    "mapped": lambda: Model(lambda _, x: torch.func.vmap(Mapped.apply)(x)),
    "differentiated in forward": lambda: Model(gradient_in_evaluation),
    "computed again": lambda: Model(
        lambda m, x: Recomputed.apply(x, m.part.weight) + m.part.bias, **linear()
    ),
    "hooked twice": lambda: Model(hooked_twice),
    "hook removed": lambda: Model(hook_removed),
    "hook that converts": lambda: Model(hook_that_converts),
    "packed": lambda: Model(packed),
    "counted batch norm": lambda: Model(
        lambda m, x: m.norm(x), norm=nn.BatchNorm1d(8, momentum=None)
    ),
    "affine grid": lambda: Model(affine, theta=nn.Linear(8, 6)),
    "distances": lambda: Model(lambda m, x: torch.cdist(x, m.last.weight)),
    "taken along a dim": lambda: Model(lambda _, x: torch.take_along_dim(x, x.argsort(-1), -1)),
}


@pytest.mark.matrix("all outputs used", "differentiated in forward", "hooked twice")
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_captured_and_derived(name: str) -> None:
    program = capture(job(FORMS[name]()))
    check_step(
        program, "train", derive(program, "train", torch.device("cpu")), {"x": torch.randn(6, 8)}
    )
    derive(program, "eval", torch.device("cpu"))


@pytest.mark.slow  # rare in combination; test_regions.py captures each of them
def test_a_checkpoint_in_a_branch_of_cond_is_the_call_alone() -> None:
    def branch(m: Any, x: Tensor) -> Any:
        return torch.cond(
            x.sum() > -100,
            lambda t: checkpoint(lambda u: m.part(u).tanh(), t, use_reentrant=False),
            lambda t: m.part(t).sin(),
            (x,),
        )

    program = capture(job(Model(branch, **linear())))
    check_step(
        program, "train", derive(program, "train", torch.device("cpu")), {"x": torch.randn(6, 8)}
    )


def test_a_backward_that_asks_is_traced_for_each_set_of_outputs_that_it_takes() -> None:
    graph = capture(job(FORMS["two outputs used"]())).graphs["train"].exported.graph_module
    (call,) = [n for n in graph.graph.nodes if "trainload_backward_by_use" in str(n.target)]
    assert call.args[2] == (0b111, 0b101, 0b011, 0b001)  # the first gradient is required
    # The second input has a gradient if the second output has one.
    assert call.args[3] == (0b11, 0b01, 0b11, 0b01)


def test_a_function_that_is_given_zeros_has_one_backward() -> None:
    assert "trainload_backward_by_use" not in targets(
        capture(job(Model(lambda _, x: Scaled.apply(x))))
    )


def test_the_running_statistics_of_a_counted_batch_norm_are_the_mean_over_all_steps() -> None:
    torch.manual_seed(0)
    model = FORMS["counted batch norm"]()
    twin = copy.deepcopy(model).train()
    step = capture(job(model)).graphs["train"].exported.module(check_guards=False)
    for rows in (3, 5, 9):
        batch = {"x": torch.randn(rows, 8)}
        step(batch)
        twin(batch["x"])
    found, expected = dict(step.named_buffers()), dict(twin.named_buffers())
    assert {int(b) for n, b in found.items() if n.endswith("num_batches_tracked")} == {3}
    for name in ("running_mean", "running_var"):
        (value,) = [b for n, b in found.items() if n.endswith(name)]
        torch.testing.assert_close(value, expected[f"norm.{name}"])


def rounded(m: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.bfloat16()), lambda kept: kept[1].to(kept[0])
    ):
        return m.part(x).tanh().square()


def removed_late(_: Any, x: Tensor) -> Any:
    y = x.sin()
    handle = y.register_hook(lambda g: g * 3) if y.requires_grad else None
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    if handle is not None:
        handle.remove()
    return y + g


@pytest.mark.parametrize(
    ("middle", "problem"),
    [
        (rounded, "change the values saved for backward"),
        (removed_late, "removed after a gradient was taken"),
        (lambda _, x: Lost.apply(x.clone()), "dirty that is not both an argument and a result"),
        (lambda _, x: Five.apply(x)[2], "distinguishes which of 5 outputs are used"),
    ],
)
def test_what_has_no_sound_form_is_refused(middle: Middle, problem: str) -> None:
    with pytest.raises(CaptureError, match=problem):
        capture(job(Model(middle, **linear())))


def test_a_model_that_fails_on_any_size_is_not_said_to_fail_on_another_size() -> None:
    def middle(_: Any, x: Tensor) -> Any:
        y = x.sin()
        y.register_hook(lambda g: g * 2)  # raises without a gradient, as in evaluation
        return y

    with pytest.raises(CaptureError, match="cannot register a hook") as caught:
        capture(job(Model(middle)))
    assert [finding.cause for finding in caught.value.findings] == ["model-fails"]
