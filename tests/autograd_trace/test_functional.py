"""Graphs without writes are traced directly, with the same result as through AOT autograd."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.autograd_trace.step_graph_calls import CPU, program_of, run
from tests.capture.jobs import Batch, Model, job
from torch import Tensor, nn
from torch.nn import functional

from trainload.autograd_trace.derivation import aot
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.autograd_trace.derivation.step_module import is_functional, is_plain
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.job.definition import Loss
from trainload.capture.operators import is_overload


class Attention(nn.Module):
    """One attention head over four vectors per row, with dropout and a frozen parameter.

    The middle is under autocast, and one part has no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 6)
        self.shift = nn.Parameter(torch.randn(2), requires_grad=False)
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(-1, 4, 2) + self.shift
        query, key, value = self.mix(parts).chunk(3, -1)
        with torch.no_grad():
            scale = query.detach().abs().mean() + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            found = self.last(functional.dropout(found, 0.5, self.training))
        result: Tensor = found.float() / scale
        return result.flatten(1)


def loss_and_metric(model: nn.Module, batch: Batch) -> Loss:
    out = model(batch["x"])
    return Loss(
        out.square().mean(),
        weight=(batch["x"] > 0).sum(),
        metrics={"largest": out.amax(), "rows": batch["x"].sum()},
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "views": lambda: Model(
        lambda m, x: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)[..., m.order],
        order=torch.tensor([3, 3, 0, 1, 2, 5, 5, 5]),
    ),
    "tied": lambda: Model(
        lambda m, x: (
            functional.linear(x, m.last.weight) + functional.linear(x, m.last.weight).relu()
        )
    ),
    "unused": lambda: Model(left=nn.Parameter(torch.ones(3))),
    "constant": lambda: Model(lambda _, x: x * torch.arange(8.0)),
}


Both = Callable[[str], tuple[StepGraph, StepGraph]]


def by_aot(program: Any, graph: str) -> StepGraph:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "is_functional", lambda _: False)
        return derive(program, graph, CPU)


def operators(step: StepGraph) -> Counter[str]:
    """Count the calls of each tensor operator.

    A detached view counts as an alias, because torch 2.15 traces it as either.
    """
    names = (
        str(node.target)
        for node in step.module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    )
    return Counter(name.replace("aten.detach.", "aten.alias.") for name in names)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "views" else pytest.mark.slow) for name in MODELS
    ],
)
def program(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return program_of(
        job(
            MODELS[request.param](),
            loss=loss_and_metric,
            predict=lambda model, batch: model(batch["x"]),
        )
    )


@pytest.fixture(scope="module")
def both(program: Any) -> Both:
    """Graph -> its step graph, traced directly and by AOT autograd."""

    @functools.cache
    def of(graph: str) -> tuple[StepGraph, StepGraph]:
        return derive(program, graph, CPU), by_aot(program, graph)

    return of


@pytest.mark.parametrize("graph", ["train", "eval", "predict"])
def test_the_graph_has_the_operators_of_aot_autograds(graph: str, program: Any, both: Both) -> None:
    assert is_functional(program.graphs[graph].exported.graph_module)
    once, again = both(graph)
    assert operators(once) == operators(again)


@pytest.mark.parametrize("graph", ["train", "eval", "predict"])
def test_the_graph_computes_what_aot_autograds_computes(
    graph: str, program: Any, both: Both
) -> None:
    batch = {"x": torch.randn(5, 8)}
    once, again = (run(step, program, batch, name=graph) for step in both(graph))
    assert once.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in once.items())


def test_a_count_of_entries_is_a_product_of_sizes(both: Both) -> None:
    """Otherwise backward would keep a tensor of forward only to count its elements."""
    nodes = both("train")[0].module.graph.nodes
    assert not any(node.target is torch.ops.aten.sym_numel.default for node in nodes)


def counting(module: Any, x: Tensor) -> Tensor:
    module.seen.add_(x.detach().mean())
    return x * 2


@functools.cache
def of_middle(middle: Any) -> Any:
    return program_of(job(Model(middle, seen=torch.zeros(()))))


@pytest.mark.matrix("<lambda>0", "counting")
@pytest.mark.parametrize(
    "middle",
    [
        lambda _, x: x.clone().mul_(2),
        counting,
        lambda _, x: torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,)),
    ],
)
def test_a_graph_that_writes_or_branches_is_left_to_aot_autograd(middle: Any) -> None:
    program = of_middle(middle)
    assert not is_functional(program.graphs["train"].exported.graph_module)


@pytest.fixture
def writing_operator() -> Iterator[Any]:
    with torch.library._scoped_library("trainload_test_functional", "DEF") as library:
        library.define("bumped(Tensor x) -> Tensor")
        library.impl("bumped", lambda x: (x * 1).add_(1), "CompositeImplicitAutograd")
        yield torch.ops.trainload_test_functional.bumped.default


def test_an_operator_whose_decomposition_writes_is_made_functional(writing_operator: Any) -> None:
    program = program_of(job(Model(lambda _, x: writing_operator(x))))
    assert is_functional(program.graphs["train"].exported.graph_module)
    step = derive(program, "train", CPU)
    check_step(program, "train", step, {"x": torch.randn(4, 8)})
    assert not any(
        is_overload(node.target) and node.target._schema.is_mutable
        for node in step.module.graph.nodes
    )


def test_a_graph_is_plain_where_nothing_can_go_wrong_in_deriving_it(program: Any) -> None:
    drawing = program_of(job(Model(lambda _, x: functional.dropout(x, 0.5, training=True))))
    writing = of_middle(counting)
    assert {name: is_plain(graph) for name, graph in program.graphs.items()} == {
        "train": False,
        "eval": True,
        "predict": True,
    }
    assert not is_plain(drawing.graphs["eval"]) and not is_plain(writing.graphs["eval"])
