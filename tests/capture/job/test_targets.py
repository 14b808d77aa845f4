"""Captures and rejections of jobs with several graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.jobs import Model
from tests.optimizers import optimizer_of
from torch import Tensor, nn

from trainload import Graph, Job, Loss, Turn
from trainload.autograd_trace.optimizer.trainers import make_loop
from trainload.capture.program import Program
from trainload.capture.tracing.targets import targets_of
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result


def scored(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    out = model(batch["x"])
    return Loss(out.square().mean(), outputs={"score": out.sum(-1)})


def fed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    result: Tensor = (model(batch["x"]).sum(-1) * batch["score"]).mean()
    return result


def compute(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"score": model(batch["x"]).sum(-1)}


def several(graphs: dict[str, Graph], **options: Any) -> Job:
    return Job(Model(), {"x": torch.randn(4, 8)}, **{"optimizer": sgd, **options}, graphs=graphs)


PAIR = {"first": Graph(loss=scored), "second": Graph(loss=fed, feeds={"score": "first.score"})}


def test_a_loss_is_captured_for_training_and_for_evaluation() -> None:
    job = several(
        {"first": Graph(loss=loss), "teach": Graph(compute=compute)}, predict=lambda m, b: m(b["x"])
    )
    assert [t.name for t in targets_of(job)] == ["first", "first-eval", "teach", "predict"]


@pytest.fixture(scope="module")
def pair() -> Program:
    """Two graphs, one of which feeds the other."""
    return capture(several(PAIR))


def test_a_graph_that_is_fed_takes_what_feeds_it_as_an_input(pair: Program) -> None:
    assert [i.name for i in pair.graphs["second"].inputs] == ["score", "x"]
    assert [(o.name, o.role.value) for o in pair.graphs["first"].outputs] == [
        ("loss", "loss"),
        ("score", "output"),
    ]


def test_no_gradient_flows_through_what_feeds_another_graph(pair: Program) -> None:
    outputs = pair.graphs["first"].exported.module(check_guards=False)({"x": torch.randn(4, 8)})
    assert [value.requires_grad for value in outputs] == [True, False]


def test_a_variant_is_captured_beside_each_graph() -> None:
    def either(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out = model(batch["x"])
        result: Tensor = (out if "mask" not in batch else out * batch["mask"]).square().mean()
        return result

    masked = {"x": torch.randn(4, 8), "mask": torch.rand(4, 8)}
    program = capture(
        Job(Model(), {"x": torch.randn(4, 8)}, sgd, either, variants={"masked": masked})
    )
    assert sorted(program.graphs) == ["eval", "eval-masked", "train", "train-masked"]
    assert [i.name for i in program.graphs["train-masked"].inputs] == ["mask", "x"]
    assert (program.graphs["eval-masked"].graph, program.graphs["eval-masked"].variant) == (
        "train",
        "masked",
    )


def test_a_function_reads_of_a_variant_what_is_there() -> None:
    masked = {"x": torch.randn(4, 8), "mask": torch.rand(4, 8)}
    job = Job(
        Model(),
        {"x": torch.randn(4, 8)},
        sgd,
        loss,
        variants={"masked": masked},
        predict=lambda m, b: m(b["x"]),
        predict_inputs=["x", "mask"],
    )
    assert {t.name: sorted(t.batch) for t in targets_of(job) if "predict" in t.name} == {
        "predict": ["x"],
        "predict-masked": ["mask", "x"],
    }


def test_parts_of_a_group_that_a_graph_does_not_reach_are_groups_of_their_own() -> None:
    def first_only(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model.get_submodule("first")(batch["x"]).square().mean()  # type: ignore[no-any-return]  # a tensor's

    job = several({"whole": Graph(loss=loss), "part": Graph(loss=first_only)})
    recipe, updates = optimizer_of(job, capture(job))
    reached = {
        name: {p for g in recipe.groups if g.name in graph.groups for p in g.parameters}
        for name, graph in recipe.graphs.items()
    }
    assert reached["part"] == {"first.weight", "first.bias"}
    assert reached["whole"] == {n for n, _ in job.model.named_parameters()}
    assert [u.group for u in updates] == [g.name for g in recipe.groups]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"graphs": {"Bad-Name": Graph(loss=loss)}}, "invalid name"),
    "a reserved name": ({"graphs": {"eval": Graph(loss=loss)}}, "invalid name"),
    "both": (
        {"graphs": {"a": Graph(loss=loss, compute=compute)}},
        "needs either a loss or a compute function",
    ),
    "neither": ({"graphs": {"a": Graph()}}, "needs either a loss or a compute function"),
    "nothing trains": ({"graphs": {"a": Graph(compute=compute)}}, "no graph has a loss"),
    "an optimizer of nothing": (
        {"graphs": {"a": Graph(compute=compute, optimizer=sgd), "b": Graph(loss=loss)}},
        "cannot be trained",
    ),
    "no optimizer": (
        {"graphs": {"a": Graph(loss=loss)}, "optimizer": None},
        "no optimizer is specified for this loss",
    ),
    "a loss beside graphs": (
        {"graphs": {"a": Graph(loss=loss)}, "loss": loss},
        "loss cannot be combined with graphs",
    ),
    "a shared schedule": (
        {"graphs": {"a": Graph(loss=loss, schedule=lambda s: 1.0)}},
        "shares its optimizer with other graphs",
    ),
    "a later source": (
        {"graphs": {"b": PAIR["second"], "first": PAIR["first"]}},
        "fed by an output of an earlier graph",
    ),
    "no such output": (
        {"graphs": {"first": Graph(loss=loss), "b": PAIR["second"]}},
        "an unknown output",
    ),
    "an entry of the batch": (
        {"graphs": {"first": PAIR["first"], "b": Graph(loss=fed, feeds={"x": "first.score"})}},
        "not already in the batch",
    ),
    "an input of nothing": (
        {"graphs": {"a": Graph(loss=loss, inputs=["y"])}},
        "names inputs that are not in the batch",
    ),
    "a loop of one": ({"graphs": {}, "loss": loss, "loop": ["train"]}, "a loop requires graphs"),
    "no optimizer at all": (
        {"graphs": {}, "loss": loss, "optimizer": None},
        "the job has no optimizer",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_hold_together_is_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(JobError, match=message):
        targets_of(several(**options))


LOOPS: dict[str, tuple[list[Any], str]] = {
    "unknown": (["first", "third"], "does not name one of the graphs"),
    "no times": ([Turn("first", times=0), "second"], r"Job\.loop\[0\]\.times"),
    "idle": (["first"], "a graph never runs"),
    "rare": ([Turn("first", every=2), Turn("second", every=2)], "must run in every round"),
    "fed too late": (["second", "first"], "not always available when it runs"),
    "fed from another batch": (
        ["first", Turn("second", fresh=True)],
        "not always available when it runs",
    ),
    "fed by a fresh one": (["first", Turn("first", fresh=True), "second"], ""),
    "fed too rarely": ([Turn("first", every=2), "second"], "not always available when it runs"),
}


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_a_loop_that_does_not_hold_together_is_refused(name: str) -> None:
    loop, message = LOOPS[name]
    if not message:
        assert len(make_loop(several(PAIR, loop=loop))) == len(loop)
        return
    with pytest.raises(JobError, match=message):
        make_loop(several(PAIR, loop=loop))


def test_variants_that_return_other_values_are_refused() -> None:
    def either(model: nn.Module, batch: dict[str, Any]) -> Loss:
        out = model(batch["x"]).square().mean()
        return Loss(out, metrics={"masked": out.detach()} if "mask" in batch else {})

    masked = {"x": torch.randn(4, 8), "mask": torch.rand(4, 8)}
    with pytest.raises(JobError, match="different values from the first one"):
        capture(Job(Model(), {"x": torch.randn(4, 8)}, sgd, either, variants={"masked": masked}))


def test_a_graph_that_cannot_be_captured_is_named() -> None:
    def branching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch) if model(batch["x"]).sum() > 0 else -loss(model, batch)

    with pytest.raises(CaptureError, match="the critic graph cannot be captured"):
        capture(several({"actor": Graph(loss=loss), "critic": Graph(loss=branching)}))
