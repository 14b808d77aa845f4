"""Step graphs compute eager's loss and gradients, and are flat and functional."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tests.autograd_trace.step_graph_calls import CPU, program_of, run
from tests.capture.jobs import Batch, Model, job, mean_square
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.interpret import GraphInterpreter
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.capture.job.definition import Loss
from trainload.capture.program import Program
from trainload.core.errors import CaptureError


def conditional(_: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
    return result


def looped(_: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        _, scaled = torch.while_loop(  # type: ignore[no-untyped-call]  # torch's own
            lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.9), (torch.tensor(0), x.detach())
        )
    result: Tensor = x + scaled
    return result


def looped_with_gradient(_: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = torch.while_loop(  # type: ignore[no-untyped-call]  # torch's own
        lambda i, y: i < 3, lambda i, y: (i + 1, (y * 1.1).sin()), (torch.tensor(0), x)
    )[1]
    return found


def mixed(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = m.one(x)
        with torch.autocast("cpu", enabled=False):
            x = m.two(x.float())
    return x


def linears() -> dict[str, nn.Module]:
    return {"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)}


def tied() -> Model:
    model = Model()
    model.last.weight = model.first.weight
    return model


def frozen() -> Model:
    model = Model()
    model.first.weight.requires_grad_(False)
    return model


def attention(_: nn.Module, x: Tensor) -> Tensor:
    q = x.view(-1, 2, 2, 2).transpose(1, 2)
    return (
        functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        .transpose(1, 2)
        .reshape(x.shape)
    )


IN_PLACE: dict[str, tuple[Any, int]] = {
    "dropout": (functional.dropout, 2),
    "dropout1d": (functional.dropout1d, 3),
    "dropout2d": (functional.dropout2d, 4),
    "dropout3d": (functional.dropout3d, 5),
    "alpha_dropout": (functional.alpha_dropout, 2),
    "feature_alpha_dropout": (functional.feature_alpha_dropout, 3),
}
"""Operators with an in-place variant, and the number of dims of their input."""


def drop_nothing(function: Any, dims: int, m: nn.Module, x: Tensor) -> Tensor:
    """Apply `function` in place with p=0, which leaves the result that relu saved unchanged."""
    positive = torch.relu(x).view(x.shape[0], 8, *[1] * (dims - 2))
    dropped: Tensor = function(positive, 0.0, m.training, inplace=True)
    return dropped.view(x.shape)


MODELS = {
    "plain": Model(),
    "tied": tied(),
    "frozen": frozen(),
    "batch norm": Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(8)),
    "constant": Model(lambda _, x: x * torch.tensor([2.0])),
    "unused": Model(spare=nn.Linear(2, 2)),
    "attention": Model(attention),
    "cond": Model(conditional),
    "while_loop": Model(looped),
    "while_loop with gradient": Model(looped_with_gradient),
    "0-dim parameter": Model(lambda m, x: x * m.gain, gain=nn.Parameter(torch.tensor(1.5))),
    "spectral norm": Model(
        lambda m, x: m.sn(x), sn=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "autocast": Model(mixed, **linears()),
    "float64": Model().double(),
    "bfloat16": Model().bfloat16(),
    **{
        f"{name} of nothing": Model(functools.partial(drop_nothing, *entry))
        for name, entry in IN_PLACE.items()
    },
}


@functools.cache
def derived(name: str) -> tuple[Program, StepGraph]:
    program = program_of(
        job(MODELS[name], batch={"x": torch.randn(4, 8).to(next(MODELS[name].parameters()).dtype)})
    )
    return program, derive(program, "train", CPU)


@pytest.mark.matrix(
    "tied",
    "frozen",
    "batch norm",
    "unused",
    "autocast",
    "dropout of nothing",
    "feature_alpha_dropout of nothing",
)
# torch itself causes this warning in eager `cond`
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_eagers(name: str) -> None:
    model = MODELS[name]
    batch = {"x": torch.randn(4, 8).to(next(model.parameters()).dtype)}
    program, graph = derived(name)
    out = run(graph, program, batch)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    loss = mean_square(model, batch)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        loss, list(trained.values()), allow_unused=True
    )
    torch.set_autocast_cache_enabled(cache)
    tight: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-6}
        if name not in ("autocast", "bfloat16")
        else {"rtol": 1e-2, "atol": 1e-3}
    )
    torch.testing.assert_close(out["loss/loss"], loss.detach(), **tight)
    for parameter, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            assert f"gradient/{parameter}" not in out
        else:
            torch.testing.assert_close(
                out[f"gradient/{parameter}"] / 4, gradient, **tight, msg=parameter
            )
    for buffer, value in model.named_buffers():
        if f"buffer/{buffer}" in out:
            torch.testing.assert_close(out[f"buffer/{buffer}"], value)
        else:
            assert torch.equal(value, buffers[buffer])


def test_an_autocast_region_computes_in_bfloat16() -> None:
    graph = derived("autocast")[1].module.graph
    products = [
        n
        for n in graph.nodes
        if n.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    ]
    assert [n for n in products if n.meta["val"].dtype is torch.bfloat16]
    assert [n for n in products if n.meta["val"].dtype is torch.float32]


def test_the_gradient_is_that_of_scale_times_weight_times_loss() -> None:
    program = program_of(
        job(Model(), loss=lambda m, b: Loss(mean_square(m, b), weight=b["x"].square().sum()))
    )
    graph = derive(program, "train", CPU)
    batch = {"x": torch.randn(6, 8)}
    one, other = run(graph, program, batch), run(graph, program, batch, scale=0.25)
    torch.testing.assert_close(one["weight/weight"], batch["x"].square().sum())
    torch.testing.assert_close(one["gradient/first.weight"] * 0.25, other["gradient/first.weight"])


def test_the_weight_of_a_job_that_gives_none_is_its_rows() -> None:
    program, graph = derived("plain")
    assert run(graph, program, {"x": torch.randn(7, 8)})["weight/weight"].item() == 7


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_what_surrounds_a_derivation_does_not_reach_it(
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    program, graph = derived("plain")
    with context():
        inside = derive(program, "train", CPU)
    assert inside.outputs == graph.outputs
    assert inside.module.code == graph.module.code


def test_the_backward_part_begins_at_its_node() -> None:
    graph = derived("plain")[1].module.graph
    names = [n.name for n in graph.nodes]
    products = [i for i, n in enumerate(graph.nodes) if n.target is torch.ops.aten.mm.default]
    assert min(products) > names.index(TANGENT)  # the products of forward are addmm


@functools.cache
def predicting() -> tuple[Model, Program]:
    model = Model(lambda m, x: functional.dropout(x, 0.5, m.training))
    return model, program_of(
        job(model, predict=lambda m, b: {"out": m(b["x"]), "weight": m.last.weight})
    )


@pytest.mark.parametrize("graph", ["eval", "predict"])
def test_a_graph_that_is_not_for_training_is_forward_only(graph: str) -> None:
    step = derive(predicting()[1], graph, CPU)
    assert TANGENT not in [n.name for n in step.module.graph.nodes]
    assert not {p.role for p in step.inputs} & {Role.SEED, Role.SCALE}


def test_a_prediction_is_eagers() -> None:
    model, program = predicting()
    batch = {"x": torch.randn(3, 8)}
    out = run(derive(program, "predict", CPU), program, batch, name="predict")
    torch.testing.assert_close(out["prediction/out"], model.eval()(batch["x"]).detach())
    assert torch.equal(out["prediction/weight"], model.last.weight)


def test_a_joint_graph_with_the_number_of_rows_in_it_is_refused() -> None:
    step = derive(program_of(job(Model(), dynamic={"x": {0: Dim.STATIC}})), "train", CPU)
    with pytest.raises(CaptureError, match="the joint graph fails on 5 rows"):
        check_step(derived("plain")[0], "train", step, job(Model()).batch)


def test_masked_select_is_derived_for_any_number_of_rows() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"])
        return torch.masked_select(out, batch["x"][:, :1] > 0).square().sum() / out.shape[0]

    given = job(Model(), loss=loss)
    program = program_of(given)
    check_step(program, "train", derive(program, "train", CPU), given.batch)


@pytest.mark.slow
def test_another_device_leaves_the_captured_graph_as_it_is() -> None:
    program = program_of(
        job(
            Model(
                lambda _, x: torch.cond(
                    x.sum() > 0, lambda t: t + torch.ones(8), lambda t: t * 1, (x,)
                )
            )
        )
    )
    before = [
        str(m.graph)
        for m in program.graphs["eval"].exported.graph_module.modules()
        if isinstance(m, torch.fx.GraphModule)
    ]
    derive(program, "eval", torch.device("meta"))
    assert before == [
        str(m.graph)
        for m in program.graphs["eval"].exported.graph_module.modules()
        if isinstance(m, torch.fx.GraphModule)
    ]


def test_a_view_may_need_a_copy_on_another_device() -> None:
    def flattened(x: Tensor) -> Tensor:
        return x.permute(1, 0, 2).view(-1, 4)

    captured = make_fx(flattened, tracing_mode="fake")(torch.empty(3, 2, 4).permute(1, 0, 2))
    elsewhere = torch.device("meta")
    result = GraphInterpreter(captured, None, elsewhere, 2).run(
        torch.empty(2, 3, 4, device=elsewhere)
    )
    assert result.shape == (6, 4)
