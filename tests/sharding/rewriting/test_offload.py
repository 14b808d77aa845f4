"""Activation offload gives bitwise equal values, and the device keeps less."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.capture.jobs import job
from tests.sharding import given
from tests.sharding.given import value
from tests.sharding.rewriting.test_recompute import CASES, captured, results
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.compiling.inductor import compile_graph, load_compiled
from trainload.autograd_trace.graphs import TANGENT, Port, Role, StepGraph
from trainload.autograd_trace.recompute.host_copies import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from trainload.core.errors import PlanError
from trainload.launching.node.determinism import deterministic
from trainload.sharding.analysis.liveness import Storages, held
from trainload.sharding.plans.strategies import Recompute
from trainload.sharding.rewriting.offload import check_offload, offload_kept
from trainload.sharding.rewriting.recompute import recomputed


def layers(fraction: float = 1.0) -> StepGraph:
    return offload_kept(captured("layers")[2], fraction)


def nodes_of(step: StepGraph, target: object) -> list[Node]:
    return [node for node in step.module.graph.nodes if node.target is target]


def place_in(step: StepGraph) -> Callable[[Node], int]:
    return {node: index for index, node in enumerate(step.module.graph.nodes)}.__getitem__


def begin_of_backward(step: StepGraph) -> int:
    return next(i for i, n in enumerate(step.module.graph.nodes) if n.name == TANGENT)


@pytest.mark.matrix("layers-job-1.0", "LSTM-full-0.5")
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("how", ["job", "full"])
@pytest.mark.parametrize("case", [*CASES, "layers"])
def test_no_value_changes(case: str, how: Recompute, fraction: float) -> None:
    step = recomputed(captured(case)[2], how)
    made = offload_kept(step, fraction)
    assert (made.inputs, made.outputs) == (step.inputs, step.outputs)
    assert nodes_of(made, OFFLOAD)
    assert all(
        itertools.starmap(torch.equal, zip(results(case, step), results(case, made), strict=True))
    )


def test_a_device_keeps_a_fifth_of_deep_layers() -> None:
    kept = held(captured("layers")[2].module).peak
    assert held(layers().module).peak < 0.22 * kept, "2 of 16 parts, and what backward computes"


def test_half_of_the_parts_leaves_about_half_of_the_bytes() -> None:
    whole, half = held(layers().module), held(layers(0.5).module)
    assert 0.4 * whole.host < half.host < 0.6 * whole.host
    assert whole.peak < half.peak < 0.65 * held(captured("layers")[2].module).peak


def test_no_offload_leaves_the_graph_as_it_is() -> None:
    step = captured("layers")[2]
    assert offload_kept(step, 0.0) is step


def test_backward_reads_no_value_of_forward_that_was_offloaded() -> None:
    made = layers()
    storages = Storages(made.module)
    gone = {storages.of[node.all_input_nodes[0]] for node in nodes_of(made, OFFLOAD)}
    backward = list(made.module.graph.nodes)[begin_of_backward(made) :]
    assert gone
    assert not [
        (node, source)
        for node in backward
        for source in node.all_input_nodes
        if storages.of[source] in gone
    ]


def test_every_copy_has_ended_before_backward_begins() -> None:
    made = layers()
    place, begin = place_in(made), begin_of_backward(made)
    awaited = {host for node in nodes_of(made, OFFLOADED) for host in node.args[0]}  # type: ignore[union-attr]
    assert awaited == set(nodes_of(made, OFFLOAD))
    assert all(place(node) < begin for node in nodes_of(made, OFFLOADED))


def test_a_value_exists_until_it_was_copied() -> None:
    for waiting in nodes_of(layers(), OFFLOADED):
        hosts, values = waiting.args
        assert [host.args[0] for host in hosts] == values  # type: ignore[union-attr]


def test_values_come_back_before_backward_uses_those_of_the_part_after_theirs() -> None:
    made = layers()
    place = place_in(made)
    reloads = nodes_of(made, RELOAD)
    assert len(reloads) == len(nodes_of(made, OFFLOAD))
    assert all(place(node) > begin_of_backward(made) for node in reloads)
    for reload in reloads:
        (end,) = reload.users
        between = list(made.module.graph.nodes)[place(reload) : place(end)]
        assert [node for node in between if node.target not in (RELOAD, RELOADED)], (
            "there is something to compute meanwhile"
        )


def test_a_result_is_not_offloaded() -> None:
    made = offload_kept(captured("LSTM")[2], 1.0)
    storages = Storages(made.module)
    (output,) = made.module.graph.find_nodes(op="output")
    returned = {storages.of[node] for node in output.all_input_nodes}
    offloaded = {storages.of[node.all_input_nodes[0]] for node in nodes_of(made, OFFLOAD)}
    assert offloaded and not returned & offloaded


def test_sizes_of_offloaded_values_are_read_in_forward() -> None:
    made = offload_kept(captured("LSTM")[2], 1.0)
    place, begin = place_in(made), begin_of_backward(made)
    forward = set(list(made.module.graph.nodes)[:begin])
    sizes = nodes_of(made, torch.ops.aten.sym_size.int)
    assert sizes
    assert not [n for n in sizes if place(n) >= begin and n.all_input_nodes[0] in forward]


def test_a_graph_that_keeps_nothing_is_rejected() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    step = StepGraph(
        GraphModule({}, graph), (Port(Role.BATCH, "x"),), (Port(Role.PREDICTION, "x"),)
    )
    with pytest.raises(PlanError, match="train: there is no value"):
        check_offload([offload_kept(step, 1.0)], "train")


def test_copies_keep_the_layout_of_a_value() -> None:
    value = torch.arange(12.0).reshape(3, 4).t()
    host: Tensor = OFFLOAD(value)
    handle = RELOAD(host, OFFLOADED([host], [value]), value.device)
    again: Tensor = RELOADED(handle, host, value.device)
    assert torch.equal(again, value)
    assert again.stride() == value.stride()
    assert again.data_ptr() != value.data_ptr()


class Convolutions(nn.Module):
    """Convolutions whose values Inductor stores with channels last: (rows, 3, 12, 12) -> 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 24)
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_compiled_code_keeps_the_memory_that_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    torch.manual_seed(0)
    of = job(Convolutions(), batch={"x": torch.randn(4, 3, 12, 12)}, loss=lambda m, b: m(b["x"]))
    program, step = given.captured_step(of)
    made = offload_kept(step, 1.0)
    inputs = [value(port, of, dict(program.state), program.constants) for port in step.inputs]
    with torch.no_grad(), deterministic():
        expected = step.module(*inputs)
        compile_graph(made.module, tmp_path / "graph.bin", {})
        # `offloaded` raises an error if a value is not in the memory that is copied
        found = load_compiled(tmp_path / "graph.bin")(*inputs)
    for result, other in zip(found, expected, strict=True):
        torch.testing.assert_close(result, other)


def test_a_value_that_was_moved_during_its_copy_is_told() -> None:
    value = torch.ones(4)
    host = OFFLOAD(value)
    with pytest.raises(RuntimeError, match="freed during its copy"):
        OFFLOADED([host], [value.clone()])


def test_values_without_elements_are_offloaded() -> None:
    values = [torch.ones(0, 3), torch.ones(3, 0)]
    hosts = [OFFLOAD(value) for value in values]
    copied = OFFLOADED(hosts, values)
    device = torch.device("cpu")
    again = [RELOADED(RELOAD(host, copied, device), host, device) for host in hosts]
    assert [each.shape for each in again] == [each.shape for each in values]
