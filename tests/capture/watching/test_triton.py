"""Triton kernels are captured only as operators of torch.library.triton_op.

Runs if triton is installed; needs no GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor
from torch.library import triton_op, wrap_triton

import trainload
from trainload.autograd_trace.derivation.aot import derive
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")


@triton.jit  # type: ignore[untyped-decorator]  # triton's
def double_kernel(x: Any, y: Any, n: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def operator(name: str) -> Any:
    def double(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        wrap_triton(double_kernel)[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), block=64)
        return y

    made: Any = triton_op(f"triton_test::{name}", double, mutates_args={})
    made.register_autograd(lambda ctx, gradient: gradient * 2)
    return made


with_cpu, without_cpu = operator("with_cpu"), operator("without_cpu")
with_cpu.register_kernel("cpu")(lambda x: x * 2)


def refusal(function: Callable[[Tensor], Tensor]) -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda _, x: function(x))))
    assert raised.value.findings[0].cause == "own-kernel"
    return raised.value


def test_an_operator_with_a_kernel_for_the_cpu_stays_one_call_in_both_graphs() -> None:
    program = capture(job(Model(lambda _, x: with_cpu(x))))
    step = derive(program, "train", torch.device("cpu"))
    for module in (program.graphs["train"].exported.graph_module, step.module):
        assert (
            sum(str(node.target) == "triton_test.with_cpu.default" for node in module.graph.nodes)
            == 1
        )


def test_an_operator_is_recorded_with_its_library(tmp_path: Path) -> None:
    package = trainload.freeze(job(Model(lambda _, x: with_cpu(x))), tmp_path / "package.tl")
    assert package.manifest.features == ("custom-ops",)
    assert list(package.manifest.op_libraries) == ["triton_test"]


def test_the_kernels_that_an_operator_launches_are_recorded(tmp_path: Path) -> None:
    package = trainload.freeze(job(Model(lambda _, x: with_cpu(x))), tmp_path / "package.tl")
    (kernel,) = package.manifest.op_libraries["triton_test"].kernels
    assert kernel.name == f"{__name__}:double_kernel"
    assert kernel.source == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def test_an_operator_without_a_kernel_for_the_cpu_is_refused_by_name() -> None:
    error = refusal(without_cpu)
    assert "triton_test::without_cpu cannot run on CPU tensors" in str(error)
    assert 'register_kernel("triton_test::without_cpu", "cpu")' in error.findings[0].rewrite


def test_a_kernel_that_forward_launches_is_refused_by_name_and_line() -> None:
    def raw(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        double_kernel[(1,)](x, y, x.numel(), block=64)
        return y

    error = refusal(raw)
    assert "the Triton kernel double_kernel" in str(error)
    assert "torch.library.triton_op" in error.findings[0].rewrite
    assert error.findings[0].place is not None
    assert error.findings[0].place.source == "double_kernel[(1,)](x, y, x.numel(), block=64)"


def test_a_wrapped_kernel_outside_of_an_operator_is_refused() -> None:
    def wrapped(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        wrap_triton(double_kernel)[(1,)](x, y, x.numel(), block=64)
        return y

    assert "launches a Triton kernel itself" in str(refusal(wrapped))


def test_a_kernel_can_be_launched_again_after_a_refusal() -> None:
    before = type(double_kernel).__getitem__
    with pytest.raises(CaptureError):
        capture(job(Model(lambda _, x: without_cpu(x))))
    assert type(double_kernel).__getitem__ is before
