"""Operators with custom kernels are captured by name if they run here, else rejected by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor

from trainload.capture.parity.replays import Check
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.freezing.prove import prove


@torch.library.custom_op("kernels_test::elsewhere", mutates_args=(), device_types="cuda")
def elsewhere(x: Tensor) -> Tensor:
    """Double a tensor; has only a CUDA kernel."""
    return x * 2


@torch.library.custom_op("kernels_test::everywhere", mutates_args=(), device_types="cuda")
def everywhere(x: Tensor) -> Tensor:
    """Double a tensor; has kernels for CUDA and the CPU."""
    return x * 2


@torch.library.custom_op("kernels_test::backward_elsewhere", mutates_args=())
def backward_elsewhere(x: Tensor) -> Tensor:
    """Double a tensor; its backward has only a CUDA kernel."""
    return x * 2


@torch.library.custom_op("kernels_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """Cube a tensor; its backward is an operator too, which has no backward."""
    return x**3


@torch.library.custom_op("kernels_test::cube_backward", mutates_args=())
def cube_backward(x: Tensor, gradient: Tensor) -> Tensor:
    return 3 * x**2 * gradient


@torch.library.custom_op("kernels_test::size_of", mutates_args=())
def size_of(x: Tensor) -> Tensor:
    """Return the mean magnitude of each row; has no derivative."""
    return x.abs().mean(1, keepdim=True)


cube.register_fake(torch.empty_like)
cube_backward.register_fake(lambda x, gradient: torch.empty_like(x))
size_of.register_fake(lambda x: x.new_empty(x.shape[0], 1))
cube.register_autograd(
    lambda ctx, gradient: cube_backward(ctx.saved_tensors[0], gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
everywhere.register_kernel("cpu")(lambda x: x * 2)
for _operator in (elsewhere, everywhere, backward_elsewhere):
    _operator.register_fake(torch.empty_like)
for _operator in (elsewhere, everywhere):
    _operator.register_autograd(lambda ctx, gradient: gradient * 2)
backward_elsewhere.register_autograd(lambda ctx, gradient: elsewhere(gradient))


@functools.cache
def refusal(function: Callable[[Tensor], Tensor]) -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda _, x: function(x))))
    assert raised.value.findings[0].cause == "own-kernel"
    return raised.value


def targets(function: Callable[[Tensor], Tensor]) -> list[str]:
    program = capture(job(Model(lambda _, x: function(x))))
    return [
        str(node.target)
        for node in program.graphs["train"].exported.graph.nodes
        if node.op == "call_function"
    ]


def test_an_operator_with_a_kernel_for_the_cpu_stays_one_call() -> None:
    assert "kernels_test.everywhere.default" in targets(everywhere)


def test_an_operator_without_a_kernel_for_the_cpu_is_refused_by_name() -> None:
    error = refusal(elsewhere)
    assert "kernels_test::elsewhere cannot run on CPU tensors" in str(error)
    assert (
        '@torch.library.register_kernel("kernels_test::elsewhere", "cpu")\ndef _(x):'
        in error.findings[0].rewrite
    )


def test_the_line_that_calls_it_is_shown() -> None:
    place = refusal(elsewhere).findings[0].place
    assert place is not None
    assert place.expression == "function(x)"


def test_an_operator_that_only_backward_calls_is_refused_by_name() -> None:
    assert "kernels_test::elsewhere cannot run on CPU tensors" in str(refusal(backward_elsewhere))


def test_an_operator_of_torch_that_fails_is_not_called_the_users() -> None:
    def fixed(x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.shape[0] != 4:
            raise ValueError("four rows")
        result: Tensor = everywhere(x)
        return result

    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda _, x: fixed(x))))
    assert raised.value.findings[0].cause == "other-batch-size"


def test_the_rewrite_can_be_pasted() -> None:
    name = "kernels_test::pasted"
    made: Any = torch.library.custom_op(name, mutates_args=(), device_types="cuda")(_pasted)
    made.register_fake(torch.empty_like)
    made.register_autograd(lambda ctx, gradient: gradient * 2)
    exec(refusal(made).findings[0].rewrite.replace("return ...", "return x * 2"), {"torch": torch})
    assert "kernels_test.pasted.default" in targets(made)


def _pasted(x: Tensor) -> Tensor:
    return x * 2


def test_an_operator_whose_backward_is_another_operator_is_captured_and_derived() -> None:
    proven = prove(job(Model(lambda _, x: cube(x))), Check.USUAL)
    (step,) = proven.steps.values()
    called = [str(node.target) for node in step.module.graph.nodes if node.op == "call_function"]
    assert "kernels_test.cube.default" in called
    assert "kernels_test.cube_backward.default" in called


@pytest.mark.slow  # rare; a test below covers a loss that needs the derivative
def test_an_operator_without_a_derivative_is_captured_where_nobody_asks_for_it() -> None:
    prove(job(Model(lambda _, x: x / (1 + size_of(x).detach()))), Check.USUAL)


def test_an_operator_without_a_derivative_is_refused_where_the_loss_needs_it() -> None:
    with pytest.raises(CaptureError) as raised:
        prove(job(Model(lambda _, x: x * size_of(x))), Check.USUAL)
    assert raised.value.findings[0].cause == "no-autograd"
    assert "kernels_test::size_of" in raised.value.findings[0].rewrite


def test_a_gradient_of_a_gradient_that_an_operator_lacks_is_refused() -> None:
    def loss(model: Model, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    with pytest.raises(CaptureError):
        prove(job(Model(lambda _, x: cube(x)), loss=loss), Check.USUAL)
