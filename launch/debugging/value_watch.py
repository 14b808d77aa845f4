"""Interpret graphs, and find the first value that is not finite, or beyond a limit, and reaches a
result.

An infinity that a graph writes on purpose, such as that of an attention mask, is no finding unless
a result is infinite because of it. A NaN that is computed from such infinities alone is one, and so
is the operator that makes an infinity from finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from trainload.autograd_trace.graphs import Port, Role
from trainload.autograd_trace.recompute.host_copies import OFFLOAD, RELOAD
from trainload.capture.operators import is_collective, is_view
from trainload.launching.debugging.batch_rows import row_symbol, rows_with
from trainload.launching.debugging.node_origins import backward_begins, line_of, module_of
from trainload.launching.debugging.sighting import Sighting
from trainload.launching.debugging.tensor_facts import (
    Level,
    TensorFacts,
    bad_elements,
    facts_of,
    level_of,
    real_numbers,
)
from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Bucket, Plan
from trainload.sharding.rewriting.rank_update import UPDATE_SCALARS
from trainload.sharding.rewriting.rewrite import BETWEEN

_MOST_INPUTS = 6
"""Maximum number of inputs of an operator that are described."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GIVEN = (Role.CONSTANT, Role.BUFFER)
"""Roles of inputs whose infinities count as written on purpose."""
_RESULTS = (Role.TOTALS, Role.BUCKET_GRADIENT, Role.PREDICTION, *BETWEEN)

Origin = Callable[[Sequence[int]], tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class _Cause:
    """A node that makes a bad value. `written`: True if it writes an infinity on purpose."""

    node: Node
    position: int
    written: bool


class Watch:
    """A search in the calls of a rank's graphs.

    Args:
        plan: plan of the graphs.
        rank: this rank.
        above: magnitude above which a finite value is bad; infinity for none.
        everywhere: True to report the first bad value even if no result is bad.
        origin: rows of the batch of the current call -> their numbers in the data, and its name.
        microbatch: returns the number of the microbatch of the current call in its draw.

    Attributes:
        sightings: the first bad value of each call that has one, in the order of the calls.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        above: float = math.inf,
        everywhere: bool = False,
        origin: Origin = lambda rows: (tuple(rows), "the batch"),
        microbatch: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.origin, self.microbatch = origin, microbatch
        self.plan, self.rank, self.above, self.everywhere = plan, rank, above, everywhere
        self.sightings: list[Sighting] = []
        self._calls = 0

    def watched(self, built: Built) -> Built:
        """Return an interpreted build whose calls are searched.

        Its graphs must have the captured operators' stack traces (`uncompiled_build`).
        """
        return built.replaced(self._watch)

    def _watch(self, graph: BuiltGraph) -> Call:
        module = graph.call
        assert isinstance(module, GraphModule), "the build is interpreted"

        def call(*arguments: Tensor) -> Sequence[Tensor]:
            watched = _WatchedCall(module, graph, self)
            results: Sequence[Tensor] = watched.run(*arguments)
            sighting = watched.sighting()
            if sighting is not None:
                self.sightings.append(replace(sighting, call=self._calls))
            self._calls += 1
            return results

        return call


def bad_parts(
    plan: Plan, rank: int, bucket: Bucket, value: Tensor, above: float
) -> dict[str, Tensor]:
    """Return parameter -> its elements, of those with bad elements in a rank's part of a bucket.

    Args:
        plan: plan of the run.
        rank: the rank.
        bucket: the bucket.
        value: the rank's part of its parameters or gradients.
        above: as in `Watch`.
    """
    return {
        name: value[low:high]
        for name, low, high in parameters_within(plan, rank, bucket, len(value))
        if level_of(value[low:high], above) is not Level.FINE
    }


class _WatchedCall(Interpreter):
    def __init__(self, module: GraphModule, graph: BuiltGraph, watch: Watch) -> None:
        super().__init__(module)
        self._module, self._graph, self._watch = module, graph, watch
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._ports: Mapping[Node, Port] = dict(zip(placeholders, graph.inputs, strict=False))
        self._positions = {node: position for position, node in enumerate(nodes)}
        self._backward = backward_begins(module, graph.inputs)
        self._symbol = row_symbol(self._ports)
        self._rows = 0
        self._levels: dict[Node, Level] = {}
        self._causes: dict[Node, _Cause] = {}
        self._found: dict[Node, Sighting] = {}
        self._bad_results: list[tuple[Node, tuple[str, ...]]] = []

    def run_node(self, n: Node) -> Any:
        """Compute a node, and look at its value while its inputs exist."""
        value = super().run_node(n)
        if n.op == "output":
            self._look_at_results(value)
        else:
            if (port := self._ports.get(n)) is not None and port.role is Role.BATCH and value.ndim:
                self._rows = value.shape[0]
            self._look(n, value)
        return value

    def sighting(self) -> Sighting | None:
        """Return the first bad value that reaches a result."""
        if self._watch.everywhere:
            causes = [cause for cause in self._causes.values() if not cause.written]
        else:
            causes = [self._causes[node] for node, _ in self._bad_results]
        if not causes:
            return None
        cause = min(causes, key=lambda each: (each.written, each.position))
        reached = dict.fromkeys(name for _, names in self._bad_results for name in names)
        found = self._found[cause.node]
        return replace(found, parameters=found.parameters or tuple(reached))

    def _look(self, node: Node, value: Any) -> None:
        if _is_pending(node):
            level = max((self._levels[n] for n in node.all_input_nodes), default=Level.FINE)
        else:
            tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
            levels = [level_of(tensor, self._watch.above) for tensor in tensors]
            level = max(levels, default=Level.FINE)
        self._levels[node] = level
        if level is Level.FINE:
            return
        sources = [n for n in node.all_input_nodes if self._levels[n] is not Level.FINE]
        if level is Level.NAN and (nans := [n for n in sources if self._levels[n] is Level.NAN]):
            sources = nans
        causes = [self._causes[source] for source in sources]
        made = [cause for cause in causes if not cause.written]
        if made or (causes and level is Level.LARGE):
            self._causes[node] = min(made or causes, key=lambda cause: cause.position)
            return
        self._causes[node] = _Cause(node, self._positions[node], self._is_written(node, level))
        self._found[node] = self._describe(node, level, value)

    def _is_written(self, node: Node, level: Level) -> bool:
        """Return True if a node writes large numbers on purpose."""
        if node.op == "placeholder":
            port = self._ports.get(node)
            return level is Level.LARGE and port is not None and port.role in _GIVEN
        numbers = [n for n in _leaves((node.args, node.kwargs)) if isinstance(n, int | float)]
        return any(math.isnan(n) or abs(n) > self._watch.above or math.isinf(n) for n in numbers)

    def _look_at_results(self, values: Sequence[Any]) -> None:
        if not self._graph.outputs:  # an update, which writes into its arguments
            self._look_at_written()
            return
        _, nodes = ends(self._module)
        results = zip(self._graph.outputs, nodes, values, strict=True)
        for port, node, value in results:
            if port.role not in _RESULTS or node not in self._causes:
                continue
            if port.role is Role.TOTALS and level_of(value[:1], self._watch.above) is Level.FINE:
                continue  # a metric is bad, not the loss
            if port.role in BETWEEN and self._causes[node].written:
                continue
            names = self._parameters(port.name, value) if port.role is Role.BUCKET_GRADIENT else ()
            self._bad_results.append((node, names))

    def _look_at_written(self) -> None:
        placeholders = [node for node in self._positions if node.op == "placeholder"]
        given = {n for n in placeholders if self._levels.get(n, Level.FINE) is not Level.FINE}
        for node in self._positions:
            if node.target is not torch.ops.aten.copy_.default:
                continue
            target = node.args[0]
            if node in self._causes and self._causes[node].node not in given:
                self._bad_results.append((node, self._updated(target, placeholders)))

    def _updated(self, target: Any, placeholders: Sequence[Node]) -> tuple[str, ...]:
        buckets = self._watch.plan.held_buckets(self._watch.plan.pipeline_index(self._watch.rank))
        index = placeholders.index(target) - UPDATE_SCALARS if target in placeholders else -1
        if not 0 <= index < len(buckets):
            return ()
        return tuple(slot.parameter for slot in buckets[index].slots)

    def _parameters(self, bucket: str, value: Tensor) -> tuple[str, ...]:
        """Return the parameters with bad elements in this rank's part of a bucket."""
        watch = self._watch
        owner = next(each for each in watch.plan.buckets if each.name == bucket)
        return tuple(bad_parts(watch.plan, watch.rank, owner, value, watch.above))

    def _describe(self, node: Node, level: Level, value: Any) -> Sighting:
        port = self._ports.get(node)
        shown, spec = self._worst(node, value)
        is_update = not self._graph.outputs
        waited = node.target is _WAIT
        if is_update:
            part = "update"
        elif port is not None:
            part = "input"
        else:
            part = "backward" if self._positions[node] >= self._backward else "forward"
        rows, source = self._watch.origin(self._rows_of(shown, spec))
        names: tuple[str, ...] = ()
        if port is not None and port.role is Role.BUCKET:
            names = self._parameters(port.name, shown)
        return Sighting(
            graph=self._graph.name,
            call=0,
            microbatch=self._watch.microbatch(),
            position=self._positions[node],
            operator=f"{port.role.value} {port.name}" if port is not None else str(node.target),
            module=module_of(node),
            line=line_of(node),
            part=part,
            level=level,
            result=facts_of(shown, "result"),
            inputs=tuple(self._inputs_of(node)),
            rows=rows,
            source=source,
            from_peers=waited or (port is not None and port.role in BETWEEN),
            parameters=names,
        )

    def _worst(self, node: Node, value: Any) -> tuple[Tensor, Any]:
        """Return the tensor of a value that is worst, and its symbolic counterpart."""
        specs = [leaf for leaf in _leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
        specs = specs if len(specs) == len(tensors) else list(tensors)
        pairs = list(zip(tensors, specs, strict=True))
        return max(pairs, key=lambda pair: level_of(pair[0], self._watch.above))

    def _rows_of(self, value: Tensor, spec: Tensor) -> tuple[int, ...]:
        if self._symbol is None or real_numbers(value) is None:
            return ()
        bad, shape = bad_elements(value, self._watch.above), list(spec.shape)
        if value.is_complex():
            bad = bad.any(-1)
        return tuple(rows_with(bad, shape, self._symbol, self._rows))

    def _inputs_of(self, node: Node) -> Iterator[TensorFacts]:
        described = 0
        for source in node.all_input_nodes:
            for leaf in _leaves(self.env.get(source)):
                if isinstance(leaf, Tensor) and not _is_pending(source):
                    if described == _MOST_INPUTS:
                        return
                    described += 1
                    yield facts_of(leaf, _name_of(source, self._ports))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _is_pending(node: Node) -> bool:
    """Return True if a node begins what a later one waits for, so its value must not be read."""
    return (is_collective(node) and node.target is not _WAIT) or node.target in (OFFLOAD, RELOAD)


def _keeps_numbers(node: Node) -> bool:
    return is_view(node) or node.target is torch.ops.aten._to_copy.default


def _name_of(node: Node, ports: Mapping[Node, Port]) -> str:
    """Return the name of the input of the graph that a node has, converts or views, or else its
    operator.
    """
    source = node
    while source not in ports and source.all_input_nodes and _keeps_numbers(source):
        source = source.all_input_nodes[0]
    port = ports.get(source)
    return str(node.target) if port is None else f"{port.role.value} {port.name}"
