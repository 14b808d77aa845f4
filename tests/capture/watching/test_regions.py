"""Constructs that torch.export drops or rejects are part of the graph.

Capture replays each model and compares loss and gradients with eager.
"""

# mypy: allow-untyped-calls
# torch's apply and register_hook have no types.
from __future__ import annotations

import functools
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from tests.capture.regions import MODELS, Scaled, linear
from tests.optimizers import optimizer_of
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.capture.job.definition import Job
from trainload.capture.operators import graphs_in
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.packaging.write import write_package

expected_warnings = pytest.mark.filterwarnings(
    "ignore:2 parameters get no gradient", "ignore:None of the inputs have requires_grad"
)


CONSTRUCTS = {
    "function_under_a_bound_name": "trainload_backward",
    "tensor_hook": "trainload_backward",
    "checkpoint_with_dropout": "trainload_checkpoint",
    "reentrant_checkpoint": "trainload_checkpoint",
    "gradient_penalty": "trainload_autograd_grad",
    "func_grad": "trainload_func_grad",
    "func_vmap": "trainload_vmap",
    "no_grad_around_cond": "wrap_with_set_grad_enabled",
    "no_grad_around_autocast": "wrap_with_autocast",
}
"""Model -> an operator of its graph."""
some_constructs = pytest.mark.matrix(
    "function_under_a_bound_name",
    "checkpoint_with_dropout",
    "full_backward_hook",
    "full_backward_pre_hook",
)
"""Selection of models whose constructs other tests do not cover.

test_export.py freezes a gradient in forward, test_gradient_forms.py and the functions below derive
hooks and functions of torch, and the hand-captured job has cond, autocast and no_grad.
"""


@functools.cache
def captured(name: str) -> tuple[Job, Program]:
    """Return one of the models, captured once for all of its tests."""
    torch.manual_seed(0)
    description = job(MODELS[name]())
    return description, capture(description)


@expected_warnings
@some_constructs
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_captured_and_its_package_has_the_joint_graph_that_autograd_says(
    name: str, tmp_path: Any
) -> None:
    description, program = captured(name)
    recipe, updates = optimizer_of(description, program)
    read = write_package(tmp_path / "p", program, updates, recipe).program()
    check_step(read, "train", derive(read, "train", torch.device("cpu")), {"x": torch.randn(6, 8)})
    derive(read, "eval", torch.device("cpu"))


def targets(program: Program) -> set[str]:
    """Return the names of the operators of a training graph, including those in bodies."""
    graph = program.graphs["train"].exported.graph_module
    parts = (p for p in graph.modules() if isinstance(p, torch.fx.GraphModule))
    return {str(n.target) for p in parts for n in p.graph.nodes if n.op == "call_function"}


@expected_warnings
@pytest.mark.matrix("function_*", "*checkpoint*", "gradient_penalty-*", "no_grad_around_cond-*")
@pytest.mark.parametrize(("name", "operator"), CONSTRUCTS.items())
def test_a_construct_is_an_operator_of_the_graph(name: str, operator: str) -> None:
    assert operator in targets(captured(name)[1])


@expected_warnings
@some_constructs
@pytest.mark.parametrize("name", MODELS)
def test_no_mark_is_left_in_a_graph(name: str) -> None:
    assert not [target for target in targets(captured(name)[1]) if "trainload_mark" in target]


def test_hooks_and_patched_functions_are_as_before_after_a_capture() -> None:
    model = MODELS["full_backward_hook"]()
    held = dict(model.get_submodule("part")._backward_hooks)
    before = (
        torch.func.grad,
        torch.compile,
        torch.autocast.__enter__,
        torch.inference_mode.__enter__,
        vars(torch.autograd.Function).keys(),
    )
    capture(job(model))
    assert dict(model.get_submodule("part")._backward_hooks) == held
    assert before == (
        torch.func.grad,
        torch.compile,
        torch.autocast.__enter__,
        torch.inference_mode.__enter__,
        vars(torch.autograd.Function).keys(),
    )


def test_a_parameter_hook_acts_once() -> None:
    model = Model()
    calls: list[int] = []

    def counted(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * 2

    model.first.weight.register_hook(counted)
    capture(job(model))
    # once in tracing and in each of the two eager replays; the graph's replays do not call it
    assert len(calls) == 3


def test_a_reentrant_checkpoint_of_the_batch_itself_passes_no_gradient() -> None:
    class Outermost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(checkpoint(self.inside, x, use_reentrant=True))
            return result

    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.warns(UserWarning, match="2 parameters get no"),
    ):
        program = capture(job(Outermost()))
    assert {p.name for p in program.parameters if p.trainable} == {"last.weight", "last.bias"}


def late(_: Any, x: Tensor) -> Tensor:
    y = x.tanh()
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * y.detach())
    return y


def output_gradients() -> nn.Module:
    model = Model(lambda m, x: m.part(x), **linear())
    model.get_submodule("part").register_full_backward_hook(
        lambda _, into, out: (into[0] * out[0].mean(),)  # type: ignore[index]
    )
    return model


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda: Model(late), "computed after the tensor"),
        (output_gradients, "reads the gradients of the module's outputs"),
        (
            lambda: Model(lambda m, x: torch.func.linearize(m.part, x)[0], **linear()),
            "torch.func.linearize",
        ),
    ],
)
def test_what_has_no_sound_form_is_refused(model: Any, problem: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(problem)):
        capture(job(model()))


def test_the_gradient_of_a_function_is_its_own() -> None:
    x = torch.randn(3, requires_grad=True)
    torch.autograd.backward(Scaled.apply(x).sum())
    assert x.grad is not None
    assert torch.allclose(x.grad, 3 * torch.sigmoid(x.detach()))


def test_a_hook_after_the_gradient_is_accumulated_is_refused() -> None:
    model = Model()
    model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CaptureError, match=r"last\.weight has a hook"):
        capture(job(model))


def test_a_sparse_gradient_is_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.table(x)
            return result

    with pytest.raises(CaptureError, match="sparse=False"):
        capture(job(Sparse(), batch={"x": torch.arange(4)}))


def mapped_along_columns(_: Any, x: Tensor) -> Tensor:
    result: Tensor = vmap(lambda column: column * column.sum(), in_dims=1, out_dims=1)(x)
    return result


def mapped_with_a_matrix(m: Any, x: Tensor) -> Tensor:
    result: Tensor = vmap(lambda row, weight: (weight @ row).tanh(), in_dims=(0, None))(
        x, m.part.weight
    )
    return result


def mapped_over_a_dict(_: Any, x: Tensor) -> Tensor:
    result: Tensor = vmap(lambda rows: {"out": rows["a"] * rows["b"]})({"a": x, "b": x.cos()})[
        "out"
    ]
    return result


def jacobian(m: Any, x: Tensor) -> Tensor:
    result: Tensor = vmap(torch.func.jacrev(lambda row: (m.part.weight @ row).tanh()))(x).sum(-1)
    return result


def curvature(m: Any, x: Tensor) -> Tensor:
    result: Tensor = vmap(torch.func.hessian(lambda row: m.part(row).tanh().sum()))(x).sum(-1)
    return result


def solved(m: Any, x: Tensor) -> Tensor:
    matrix = m.part.weight @ m.part.weight.T + torch.eye(8)
    result: Tensor = torch.linalg.solve(matrix, x.T).T
    return result


@pytest.mark.filterwarnings("ignore:. parameters get no gradient")  # some use a part of `part`
@pytest.mark.matrix("mapped_along_columns", "curvature")
@pytest.mark.parametrize(
    "middle",
    [mapped_along_columns, mapped_with_a_matrix, mapped_over_a_dict, solved, jacobian, curvature],
)
def test_a_function_of_torch_is_captured_and_derived(middle: Any) -> None:
    program = capture(job(Model(middle, **linear())))
    check_step(
        program, "train", derive(program, "train", torch.device("cpu")), {"x": torch.randn(6, 8)}
    )


@pytest.mark.slow  # starts an interpreter; goldens and ranks read packages too
def test_a_process_that_only_reads_packages_knows_the_operators(tmp_path: Any) -> None:
    description = job(MODELS["function_under_a_bound_name"]())
    program = capture(description)
    recipe, updates = optimizer_of(description, program)
    package = write_package(tmp_path / "p", program, updates, recipe)
    code = (
        "import pathlib, sys, torch\n"
        "from trainload.packaging.package import open_package\n"
        "graph ="
        " open_package(pathlib.Path(sys.argv[1])).graph('train').module(check_guards=False)\n"
        "(loss,) = graph({'x': torch.ones(3, 8)})\n"
        "loss.backward()\n"
        "print(float(loss))\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(package.path)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) > 0


@pytest.mark.matrix("train")
@pytest.mark.parametrize("graph", ["train", "eval"])
def test_a_loss_under_autocast_with_control_flow_in_it_is_one_region(graph: str) -> None:
    """Torch does not convert its mode changes if a graph starts with control-flow bodies."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(batch["x"]).float().square().mean()
        return found

    model = Model(
        lambda m, x: torch.cond(x.sum() > 0, lambda t: m.part(t), lambda t: t * 2.0, (x,)),
        part=nn.Linear(8, 8),
    )
    module = capture(job(model, loss=loss)).graphs[graph].exported.graph_module
    targets = [
        getattr(n.target, "__name__", "")
        for each in graphs_in(module)
        for n in each.graph.nodes
        if n.op == "call_function"
    ]
    assert targets.count("wrap_with_autocast") == 1
    assert not {"_enter_autocast", "_exit_autocast"} & set(targets)
