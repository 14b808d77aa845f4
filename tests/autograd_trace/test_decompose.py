"""Operator sets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, Model
from tests.capture.jobs import job as small_job
from tests.packaging.jobs import Job
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from trainload.autograd_trace.derivation.decompose import (
    becomes,
    decompose,
    is_core,
    is_device_specific,
    spelled,
)
from trainload.capture.operators import calls_in, is_overload
from trainload.capture.tracing.trace import capture

aten = torch.ops.aten


@pytest.fixture(scope="module")
def train(job: Job) -> GraphModule:
    return body(job.program.graphs["train"].exported.graph_module)


@pytest.fixture(scope="module")
def core(train: GraphModule) -> GraphModule:
    return decompose(train, lambda target: not is_core(target))


def body(module: nn.Module) -> GraphModule:
    assert isinstance(module, GraphModule)
    return module


def names(module: GraphModule) -> Counter[str]:
    return Counter(spelled(node.target) for node in calls_in(module))


def call(module: GraphModule, target: object) -> Node:
    return next(node for node in calls_in(module) if node.target is target)


@pytest.mark.parametrize(
    ("target", "core", "device"),
    [
        (aten.add.Tensor, True, False),
        (aten.linear.default, False, False),
        (aten.native_layer_norm.default, True, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, False, True),
        (aten.cudnn_batch_norm.default, False, True),
        (aten.to.dtype, False, False),
    ],
)
def test_what_an_operator_is(target: Any, core: bool, device: bool) -> None:
    assert (is_core(target), is_device_specific(target)) == (core, device)


def test_a_call_says_what_it_becomes(train: GraphModule) -> None:
    assert becomes(call(train, aten.cross_entropy_loss.default)) == (
        "aten.log_softmax.int",
        "aten.nll_loss_nd.default",
    )


def test_core_operators_become_what_they_are(train: GraphModule) -> None:
    assert becomes(call(train, aten.embedding.default)) == ()


def test_a_chosen_operator_is_gone_and_others_stay(train: GraphModule) -> None:
    before, after = (
        names(train),
        names(decompose(train, lambda target: target is aten.linear.default)),
    )
    assert after["aten.linear.default"] == 0 < before["aten.linear.default"]
    assert after["aten.batch_norm.default"] == before["aten.batch_norm.default"] == 1


def test_the_graph_itself_is_not_changed(train: GraphModule, core: GraphModule) -> None:
    assert names(train)["aten.linear.default"] == 2


def test_random_operators_stay(core: GraphModule) -> None:
    assert names(core)["aten.dropout.default"] == 1


def test_regions_and_control_flow_stay(train: GraphModule, core: GraphModule) -> None:
    kinds = ("wrap_with_autocast", "wrap_with_set_grad_enabled", "cond")
    assert [names(core)[kind] for kind in kinds] == [names(train)[kind] for kind in kinds]
    assert all(names(train)[kind] for kind in kinds)


def test_the_linear_layer_inside_the_autocast_region_is_taken_apart_there(
    core: GraphModule,
) -> None:
    inside = call(core, torch.ops.higher_order.wrap_with_autocast).args[4]
    assert isinstance(inside, Node)
    assert names(body(core.get_submodule(str(inside.target))))["aten.addmm.default"] == 1


def test_new_nodes_know_their_value_and_their_module(core: GraphModule) -> None:
    node = call(core, aten.addmm.default)
    assert isinstance(node.meta["val"], Tensor)
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "lin"
    assert "jobs.py" in node.meta["stack_trace"]


def test_batch_norm_still_writes_its_statistics(core: GraphModule) -> None:
    written = [node.target for node in calls_in(core) if "batch_norm" in spelled(node.target)]
    assert [is_overload(target) and target._schema.is_mutable for target in written] == [True]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x).view(x.shape[0], 1, 2, 4)
        return nn.functional.scaled_dot_product_attention(y, y, y)


def test_attention_stays_since_what_it_becomes_names_a_device() -> None:
    module = capture(small_job(Attention())).graphs["train"].exported.graph_module
    made = decompose(module, lambda target: not is_core(target))
    assert names(made)["aten.scaled_dot_product_attention.default"] == 1
    assert not [node for node in calls_in(made) if is_device_specific(node.target)]


def test_several_outputs_find_their_users() -> None:
    def parts(model: nn.Module, batch: Batch) -> Tensor:
        first, second = model(batch["x"]).chunk(2, -1)
        loss: Tensor = (first * second).mean()
        return loss

    module = capture(small_job(Model(), loss=parts)).graphs["train"].exported.graph_module
    made = decompose(module, lambda target: target is aten.chunk.default)
    assert (names(made)["aten.chunk.default"], names(made)["aten.split.Tensor"]) == (0, 1)
