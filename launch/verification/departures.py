"""Find the operator at which a compiled graph diverges from the interpreted one.

It bisects: parts of the graph are compiled, and called with the values that the interpreted graph
has at that place.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from trainload.autograd_trace.compiling.inductor import compile_graph, load_compiled
from trainload.capture.operators import is_collective, is_overload
from trainload.capture.parity.distance import relative_distance
from trainload.launching.node.graph_comparison import EXPLAINED
from trainload.launching.verification.rounding import explained_distances, rounded_runs
from trainload.sharding.analysis.graph_nodes import holds_tensors

_MAX_SHOWN = 3
_CPU = torch.device("cpu")

Values = dict[Node, Any]
Diverges = Callable[[Sequence[Node]], bool | None]
"""A predicate: True if a part of a graph diverges; None if the part cannot be compiled or called
alone.
"""


class _Recorder(Interpreter):
    """An interpreter that records the value of every node when it is computed; GPU values are
    copied to host memory.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: Values = {}
        # then recorded values may be overwritten later
        self._writing = any(_is_mutating(node) for node in module.graph.nodes)

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        self.values[node] = map_aggregate(value, self._snapshot)
        return value

    def _snapshot(self, value: Any) -> Any:
        return (
            _copy_to(value, _CPU)
            if isinstance(value, Tensor) and (self._writing or value.device != _CPU)
            else value
        )


def recorded(module: GraphModule, arguments: Sequence[Tensor]) -> Values:
    """Return the value of every node of a graph.

    All ranks that take part in its collectives must call it. `arguments` may be written in place.
    """
    recorder = _Recorder(module)
    with torch.no_grad():
        recorder.run(*arguments)
    return recorder.values


def departing(module: GraphModule, values: Values, *, fails: bool = False) -> list[Node]:
    """Return the operators at which a graph's compiled form diverges from the interpreted one.

    That is one operator if it diverges alone, several if only their combination diverges, and none
    if no part of the graph diverges by itself. Collectives are not called, so a rank can search
    alone. About log2(n) + 2 parts of a graph of n operators are compiled.

    Args:
        module: the graph. For results of collectives the recorded values are used.
        values: values of its nodes, from `recorded`.
        fails: True if the graph cannot be compiled or called; then a part that fails is searched.
    """
    with tempfile.TemporaryDirectory(prefix="trainload-") as folder:
        compiling = _Compiling(Path(folder))

        def diverges(part: Sequence[Node]) -> bool | None:
            return _diverges(part, values, compiling, fails=fails)

        nodes = [
            n
            for n in module.graph.nodes
            if n.op == "call_function"
            and holds_tensors(n)
            and not is_collective(n)
            and not _is_item(n)
        ]
        if not diverges(nodes):
            return []
        return (
            _find_first_diverging_node
            if any(_is_mutating(node) for node in nodes)
            else _find_diverging_part
        )(nodes, diverges)


def _find_diverging_part(nodes: list[Node], diverges: Diverges) -> list[Node]:
    """Halve a part that diverges: if the first half does not, the second one does, or only both
    together do.
    """
    proven = nodes
    while len(nodes) > 1:
        half = len(nodes) // 2
        first, second = nodes[:half], nodes[half:]
        first_diverges = diverges(first)
        if first_diverges is None:  # unknown: the half cannot be compiled alone
            first_diverges = not diverges(second)
            nodes = first if first_diverges else second
        elif first_diverges:
            proven = nodes = first
        else:
            nodes = second
    return proven if nodes is not proven and diverges(nodes) is False else nodes


def _find_first_diverging_node(nodes: list[Node], diverges: Diverges) -> list[Node]:
    """Find the first node such that the part up to it diverges.

    A graph that writes to its values cannot be cut elsewhere: a later part cannot run alone.
    """
    fine, diverging = 0, len(nodes)
    while diverging - fine > 1:
        middle = (fine + diverging) // 2
        fine, diverging = (fine, middle) if diverges(nodes[:middle]) else (middle, diverging)
    return nodes[fine:diverging]


def named(nodes: Sequence[Node]) -> str:
    """Return the operators' names for use in a sentence: "aten.amax.default", "aten.mul.Tensor with
    aten.sum.default".
    """
    names = list(dict.fromkeys(str(node.target) for node in nodes))
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return " with ".join(names[:_MAX_SHOWN]) + more


class _Compiling:
    """A compiler of parts of graphs, each into a separate file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, module: GraphModule) -> Callable[..., Any]:
        path = self._folder / f"{self._count}.bin"
        self._count += 1
        compile_graph(module, path, {})
        return load_compiled(path)


def _diverges(
    nodes: Sequence[Node],
    values: Values,
    compiling: Callable[[GraphModule], Callable[..., Any]],
    *,
    fails: bool,
) -> bool | None:
    """Return True if a part of a graph returns other values compiled than interpreted or, with
    `fails`, if it fails.

    Without `fails`, return None if the part cannot be compiled or called.
    """
    part, sources, results = _extract_part(nodes)
    if not results:
        return False
    writing = any(_is_mutating(node) for node in nodes)

    def part_arguments() -> list[Any]:
        return [_value_on_device(node, values[node], copied=writing) for node in sources]

    with torch.no_grad():
        expected = part(*part_arguments())
        try:
            # a new copy, since compiling changes the graph
            actual = compiling(_extract_part(nodes)[0])(*part_arguments())
        except Exception:  # noqa: BLE001  # compilers and generated code may raise anything
            return True if fails else None
    if fails:
        return False
    distances = [relative_distance(a, b) for a, b in zip(expected, actual, strict=True)]
    if all(distance <= EXPLAINED for distance in distances):
        return False
    explained = explained_distances(
        expected, [results for _, results in rounded_runs(part, part_arguments)]
    )
    return any(not distance <= most for distance, most in zip(distances, explained, strict=True))


def _extract_part(nodes: Sequence[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """Return a graph of some nodes of another graph, with the nodes that are its inputs and
    outputs, in order.

    It has each result of an operator with several results separately. Sizes are computed inside; so
    all inputs of the whole graph that have symbolic sizes are inputs of the part, too.
    """
    whole, nodes = nodes[0].graph, _add_items(nodes)
    sized = [node for node in whole.nodes if node.op == "placeholder" and _is_sized(node)]
    inside = _add_size_nodes(nodes)
    sources = list(
        dict.fromkeys(
            [
                *sized,
                *(
                    source
                    for node in inside
                    for source in node.all_input_nodes
                    if source not in inside
                ),
            ]
        )
    )
    results = [
        node
        for node in nodes
        if isinstance(node.meta.get("val"), Tensor)
        and (_is_mutating(node) or any(user not in inside for user in node.users))
    ]
    graph = Graph()
    copies: dict[Node, Node] = {}
    for number, source in enumerate(sources):
        copies[source] = (
            graph.node_copy(source)
            if source.op == "get_attr"
            else graph.placeholder(f"source_{number}")
        )
        copies[source].meta = dict(source.meta)
    for node in whole.nodes:
        if node in inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results)).meta["val"] = tuple(
        node.meta["val"] for node in results
    )
    return (
        GraphModule(whole.owning_module or {}, graph),
        [source for source in sources if source.op != "get_attr"],
        results,
    )


def _is_item(node: Node) -> bool:
    """Return True if a node selects one of several results of an operator."""
    return node.target is operator.getitem


def _add_items(nodes: Sequence[Node]) -> list[Node]:
    """Return these nodes and the nodes that select single results of them."""
    with_items = dict.fromkeys(nodes)
    pending = list(nodes)
    while pending:
        items = [user for user in pending.pop().users if _is_item(user) and user not in with_items]
        with_items |= dict.fromkeys(items)
        pending += items
    return list(with_items)


def _add_size_nodes(nodes: Sequence[Node]) -> set[Node]:
    """Return these nodes and the nodes that compute sizes for them."""
    with_sizes, pending = set(nodes), list(nodes)
    while pending:
        sizes = {
            each
            for each in pending.pop().all_input_nodes
            if each.op == "call_function" and not holds_tensors(each)
        } - with_sizes
        with_sizes |= sizes
        pending += sizes
    return with_sizes


def _is_sized(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape)


def _value_on_device(node: Node, value: Any, *, copied: bool) -> Any:
    """Return a node's value on the node's device."""
    if not isinstance(value, Tensor):
        return value
    device = node.meta["val"].device
    return _copy_to(value, device) if copied or value.device != device else value


def _copy_to(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy with the same strides, which a compiled graph requires."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(
        value
    )


def _is_mutating(node: Node) -> bool:
    return is_overload(node.target) and node.target._schema.is_mutable
