"""Graphs are compiled with regions, or flat with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.autograd_trace.outlining.layered import calls, graph_of
from torch.fx import GraphModule

from trainload.autograd_trace.compiling import inductor
from trainload.autograd_trace.compiling.inductor import NotCompiled, compile_graph

LAYERS = 3


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Graphs that were given to Inductor, in place of being compiled."""
    modules: list[GraphModule] = []

    def note(module: GraphModule, *_: object) -> None:
        modules.append(module)

    monkeypatch.setattr(inductor, "_compile", note)
    return modules


def test_a_graph_with_layers_is_compiled_with_calls(compiled: list[GraphModule]) -> None:
    result = compile_graph(graph_of(LAYERS), Path("graph.bin"), {})
    assert [region.calls for region in result.regions] == [LAYERS, LAYERS]
    assert result.flat_because is None
    (module,) = compiled
    assert len(calls(module)) == 2 * LAYERS


def test_a_graph_without_layers_is_compiled_as_it_is(compiled: list[GraphModule]) -> None:
    result = compile_graph(graph_of(1, trains=False), Path("graph.bin"), {})
    assert (result.regions, result.flat_because) == ((), None)
    assert not calls(compiled[0])


def test_regions_that_cannot_be_compiled_leave_the_graph_flat(
    compiled: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: GraphModule, *_: object) -> None:
        if calls(module):
            raise NotCompiled("no lowering")
        compiled.append(module)

    monkeypatch.setattr(inductor, "_compile", refuse)
    result = compile_graph(graph_of(LAYERS), Path("graph.bin"), {})
    assert result.regions == ()
    assert result.flat_because == "Inductor cannot compile its regions: no lowering"
    assert len(compiled) == 1


def test_a_mistake_of_the_outlining_leaves_the_graph_flat(
    compiled: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: GraphModule) -> None:
        raise AssertionError("a cycle")

    monkeypatch.setattr(inductor, "outline", broken)
    result = compile_graph(graph_of(LAYERS), Path("graph.bin"), {})
    assert result.flat_because is not None and "a cycle" in result.flat_because
    assert not calls(compiled[0])
