"""Comparison of the graphs before and after a pass."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from tests.capture.jobs import job as small_job
from tests.packaging.jobs import Job, batch_of
from torch.fx import GraphModule, Node

from trainload.capture.parity.compare_programs import Difference, compare
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, DataError
from trainload.packaging.graphs.graph_replacement import with_graph

aten = torch.ops.aten
Change = Callable[[GraphModule], None]
BATCHES = [batch_of(4), batch_of(5, seed=1)]


def changed(program: Program, change: Change, graph: str = "train") -> Program:
    capture = program.graphs[graph]
    module = copy.deepcopy(capture.exported.graph_module)
    change(module)
    module.recompile()
    made = dataclasses.replace(capture, exported=with_graph(capture.exported, module))
    return dataclasses.replace(program, graphs={**program.graphs, graph: made})


def compared(job: Job, change: Change) -> Difference:
    program = dataclasses.replace(job.program, state={**job.program.state, "ema": torch.ones(8)})
    return compare("train", program, changed(program, change), BATCHES)


def find(module: GraphModule, target: object) -> tuple[GraphModule, Node]:
    return next(
        (p, n)
        for p in module.modules()
        if isinstance(p, GraphModule)
        for n in p.graph.nodes
        if n.target is target
    )


def insert(module: GraphModule, after: object, target: object) -> None:
    """Apply `target` to the value of the first call of `after`."""
    part, node = find(module, after)
    with part.graph.inserting_after(node):
        new = part.graph.call_function(target, (node,))  # type: ignore[arg-type]  # an operator
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    part.recompile()


def nothing(module: GraphModule) -> None:
    """Change nothing."""


def cut_gradient(module: GraphModule) -> None:
    insert(module, aten.embedding.default, aten.detach.default)


def negate(module: GraphModule) -> None:
    insert(module, aten.batch_norm.default, aten.neg.default)


def faster_average(module: GraphModule) -> None:
    part, node = find(module, aten.mul_.Tensor)
    node.args = (node.args[0], 0.5)
    part.recompile()


def draw_before(module: GraphModule) -> None:
    part, node = find(module, aten.dropout.default)
    with part.graph.inserting_before(node):
        new = part.graph.call_function(aten.rand_like.default, (node.args[0],))
    new.meta["val"] = node.meta["val"]


def write_to_parameter(module: GraphModule) -> None:
    part, node = find(module, aten.embedding.default)
    weight = node.args[0]
    assert isinstance(weight, Node)
    with part.graph.inserting_before(node):
        data = part.graph.call_function(aten.detach.default, (weight,))
        new = part.graph.call_function(aten.mul_.Tensor, (data, 1.0))
    data.meta["val"] = new.meta["val"] = weight.meta["val"]


@pytest.fixture(scope="module")
def unchanged(job: Job) -> Difference:
    """The difference between a graph and itself."""
    return compared(job, nothing)


def test_a_graph_is_equal_to_itself_bit_for_bit_with_dropout_on(unchanged: Difference) -> None:
    assert unchanged.distance == 0.0


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (negate, "loss 'loss'|gradient of .*|metric 'accuracy'"),
        (cut_gradient, r"gradient of emb\.weight"),
        (faster_average, "buffer ema"),
        (draw_before, ".*"),
    ],
)
def test_a_change_is_seen_where_it_is(job: Job, change: Change, value: str) -> None:
    found = compared(job, change)
    assert not found.equal
    assert re.fullmatch(value, found.value)


def test_a_bf16_graph_is_given_more_room(unchanged: Difference) -> None:
    assert unchanged.tolerance == 1e-3


def test_a_graph_that_writes_to_a_parameter_is_refused(job: Job) -> None:
    with pytest.raises(
        CaptureError, match=r"the graph after the pass writes to a parameter.*emb\.weight"
    ):
        compared(job, write_to_parameter)


def test_a_graph_that_fails_is_refused(job: Job) -> None:
    with pytest.raises(CaptureError, match="the graph after the pass fails"):
        compared(
            job, lambda module: insert(module, aten.embedding.default, aten.linalg_inv.default)
        )


def test_a_loss_that_is_not_finite_compares_nothing(job: Job) -> None:
    broken = dataclasses.replace(
        job.program, state={**job.program.state, "emb.weight": torch.full((16, 8), float("nan"))}
    )
    with pytest.raises(DataError, match="the loss is not finite"):
        compare("train", broken, broken, BATCHES)


def test_weights_and_buffers_are_left_as_they_were(job: Job) -> None:
    before = {name: tensor.clone() for name, tensor in job.program.state.items()}
    compared(job, nothing)
    assert all(torch.equal(before[name], tensor) for name, tensor in job.program.state.items())


class BeforeNorm(torch.nn.Module):
    """Model whose first bias has a gradient of zero, up to rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.first(x)).sigmoid()
        return y


def round_otherwise(module: GraphModule) -> None:
    """Compute (3 x) / 3 in place of x."""
    part, node = find(module, aten.sigmoid.default)
    with part.graph.inserting_before(node):
        three = part.graph.call_function(aten.mul.Tensor, (node.args[0], 3.0))
        one = part.graph.call_function(aten.div.Tensor, (three, 3.0))
    three.meta["val"] = one.meta["val"] = node.meta["val"]
    node.args = (one,)


def test_a_gradient_that_is_nothing_but_rounding_may_be_rounded_otherwise() -> None:
    whole = capture(small_job(BeforeNorm()))
    rows = {"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(0))}
    found = compare("train", whole, changed(whole, round_otherwise), [rows])
    assert 0.0 < found.distance <= found.tolerance == 1e-5
