"""Partition a step graph over the ranks of a tensor axis: each rank runs it on its shares of some
factors.

One graph serves all ranks: the rank is an input. The result is again a step graph, with smaller
parameters and with collectives; a plan's other axes rewrite it like any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

import trainload.sharding.tensor.attention
import trainload.sharding.tensor.layer_rules
import trainload.sharding.tensor.rules  # noqa: F401 - these three register rules of operators
from trainload.autograd_trace.derivation.backward_origins import inherit_origin
from trainload.autograd_trace.graph_calls import remove_dead_code
from trainload.autograd_trace.graphs import TANGENT, Port, Role, StepGraph
from trainload.capture.operators import bodies_of
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import (
    LazyGraphModule,
    arguments,
    ends,
    holds_tensors,
    mode_of,
)
from trainload.sharding.analysis.node_costs import flops, moved_bytes
from trainload.sharding.plans.plan import TENSOR, Replicated, Shard
from trainload.sharding.tensor.factors import Dims, Factor
from trainload.sharding.tensor.links import Links
from trainload.sharding.tensor.placement import (
    Emitter,
    Exchange,
    Place,
    ShareLayout,
    Unsharded,
    position,
)
from trainload.sharding.tensor.positions import Positions, positions_of
from trainload.sharding.tensor.special import SPECIAL, Results, runs_on_shares

aten = torch.ops.aten
_VIEWS = frozenset({aten.view, aten._unsafe_view, aten.reshape})
_SIZES: Mapping[Any, int] = {
    **dict.fromkeys((*_VIEWS, aten.expand), 1),
    **dict.fromkeys(
        (
            aten.new_zeros,
            aten.new_ones,
            aten.new_full,
            aten.new_empty,
            aten.slice_backward,
            aten.select_backward,
        ),
        1,
    ),
    **dict.fromkeys((aten.full, aten.zeros, aten.ones, aten.empty), 0),
}
"""Operator -> the index of the argument that is the shape of its result."""
_MOVES = _VIEWS | {aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.detach}
_LINEAR = _MOVES | {aten.neg}
"""Operators that are linear in one operand: applied to a term of it, they yield a term of the
result.
"""
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A step graph for the ranks of a tensor axis.

    Laws: `step` has the inputs of the original graph and, last, TENSOR_RANK; sharded parameters and
    their gradients have the shape of one rank's share; all other inputs and outputs are whole, and
    equal on all ranks. `replicated` is the work that each rank repeats. `positions` are the divided
    positions; None if none were requested, or the graph has none.
    """

    step: StepGraph
    exchanges: tuple[Exchange, ...]
    replicated: tuple[Replicated, ...]
    positions: Positions | None = None


def linked(step: StepGraph) -> Links:
    """Return the factors of a step graph. Each gradient has those of its parameter, and each new
    buffer value those of the buffer.
    """
    links = Links(step.module.graph)
    placeholders, results = ends(step.module)
    inputs = {(p.role, p.name): n for p, n in zip(step.inputs, placeholders, strict=True)}
    for port, node in zip(step.outputs, results, strict=True):
        owner = {Role.GRADIENT: Role.PARAMETER, Role.BUFFER: Role.BUFFER}.get(port.role)
        if owner is not None and (owner, port.name) in inputs:
            links.tie(links.dims(node), links.dims(inputs[owner, port.name]))
    return links


def partition(
    step: StepGraph, ranks: int, shards: Mapping[str, Shard], *, positions: bool = False
) -> Partitioned:
    """Partition a step graph.

    Args:
        step: the graph.
        ranks: ranks of the tensor axis.
        shards: parameter -> its division among them; missing parameters are whole on each rank.
        positions: True to divide what no parameter's division divides by positions in the data, if
            the graph has any.

    Raises:
        PlanError: a parameter cannot be divided this way, or two of them meet in one operator that
            would need both whole.
    """
    return _Partitioner(step, ranks, shards, positions=positions).run()


class _Partitioner:
    def __init__(
        self, step: StepGraph, ranks: int, shards: Mapping[str, Shard], *, positions: bool
    ) -> None:
        self.links = linked(step)
        self._step, self._ranks = step, ranks
        self._placeholders, self._results = ends(step.module)
        self._parameters = {
            p.name: n
            for p, n in zip(step.inputs, self._placeholders, strict=True)
            if p.role is Role.PARAMETER
        }
        self._factors = {
            name: self._factor(name, shard)
            for name, shard in shards.items()
            if name in self._parameters
        }
        self._positions = positions_of(step, self.links, ranks) if positions else None
        self._position_factor = None if self._positions is None else self._positions.factor
        self._divided = [
            *dict.fromkeys(self._factors.values()),
            *([self._position_factor] if self._position_factor is not None else []),
        ]
        """In order of precedence: the first of these on whose shares an operator can run is
        chosen.
        """
        self._gathered: list[Node] = []
        self._values: dict[Node, dict[Place, Node]] = {}
        self._items: dict[Node, Results] = {}
        self._exchanges: list[Exchange] = []
        self._whole: list[Node] = []

    def run(self) -> Partitioned:
        graph = Graph()
        for node in self._placeholders:
            copied = graph.node_copy(node)
            self._values[node] = {Unsharded.WHOLE: copied}
        rank = graph.placeholder("tensor_rank")
        mode = mode_of(self._placeholders)
        with mode:
            rank.meta["val"] = torch.empty(
                (), dtype=torch.int64, device=self._placeholders[0].meta["val"].device
            )
            for name, factor in self._factors.items():
                (copied,) = self._values[self._parameters[name]].values()
                whole = copied.meta["val"]
                copied.meta["val"] = torch.empty(
                    self._share(self._parameters[name], factor),
                    dtype=whole.dtype,
                    device=whole.device,
                )
                self._values[self._parameters[name]] = {factor: copied}
        self.emit = Emitter(graph, mode, self._ranks, TENSOR, rank)
        for node in self._step.module.graph.nodes:
            if node.op == "get_attr":
                self._values[node] = {Unsharded.WHOLE: graph.node_copy(node)}
            elif node.op == "call_function":
                if node.name == TANGENT:
                    self._forget_gathered()
                self._run(node)
        results = []
        for port, node in zip(self._step.outputs, self._results, strict=True):
            owned = port.role is Role.GRADIENT and port.name in self._factors
            results.append(self.value(node, self._factors[port.name] if owned else Unsharded.WHOLE))
        graph.output(tuple(results)).meta["val"] = tuple(result.meta["val"] for result in results)
        module = LazyGraphModule(self._step.module, graph)
        remove_dead_code(module.graph)
        module.graph.lint()
        inputs = (*self._step.inputs, Port(Role.TENSOR_RANK, "tensor_rank"))
        return Partitioned(
            StepGraph(module, inputs, self._step.outputs),
            tuple(self._exchanges),
            self._replicated(),
            self._positions,
        )

    def _replicated(self) -> tuple[Replicated, ...]:
        """Return the repeated work by operator, most expensive first. Views cost nothing."""
        by_operator: dict[str, Replicated] = {}
        for node in self._whole:
            bodies = bodies_of(self._step.module, node).values()
            operations = flops(node) + sum(
                flops(inner) for body in bodies for inner in body.graph.nodes
            )
            name, (count, work, moved) = str(node.target), (1, operations, moved_bytes(node))
            if (before := by_operator.get(name)) is not None:
                count, work, moved = (
                    before.nodes + 1,
                    before.operations + work,
                    before.bytes + moved,
                )
            by_operator[name] = Replicated(operator=name, nodes=count, operations=work, bytes=moved)
        return tuple(
            sorted(
                by_operator.values(),
                key=lambda each: (-each.operations, -each.bytes, each.operator),
            )
        )

    # Factors

    def _factor(self, name: str, shard: Shard) -> Factor:
        """Return the factor that a parameter's division divides."""
        node = self._parameters[name]
        shape = tuple(node.meta["val"].shape)
        where = f"plan.tensor_shards: {name}"
        if not shard.divides(shape, self._ranks):
            raise PlanError(
                "a parameter cannot be divided this way",
                where=where,
                expected=(
                    f"a dim of {shape} that is a multiple of {shard.blocks} blocks x {self._ranks}"
                    " ranks"
                ),
                got=str(shard),
            )
        apart = self.links.factors.regroup(
            (self.links.dims(node)[shard.dim],), (shard.blocks, shape[shard.dim] // shard.blocks)
        )
        if apart is not None and can_share(
            self.links, leaf := self.links.factors.leaves(apart[1])[0], self._ranks
        ):
            return leaf
        possible = [str(each) for _, each in divisions(self.links, node, self._ranks)]
        raise PlanError(
            "the graph does not keep these shares of a parameter separate",
            where=where,
            expected=f"one of {', '.join(possible) or 'none: leave it whole'}",
            got=str(shard),
        )

    def _share(self, node: Node, factor: Factor) -> list[Any]:
        layout = self._layout(self.links.dims(node), factor)
        return [
            size // self._ranks if at == layout.dim else size
            for at, size in enumerate(node.meta["val"].shape)
        ]

    def is_among(self, factors: Sequence[Factor], factor: Factor) -> bool:
        return factor in self.links.factors.leaves(factors)

    def _active(self, node: Node) -> Factor | None:
        """Return the factor on whose shares an operator runs, among those in a dim of its operands
        or results, or None.
        """
        touched = [
            dims
            for each in (*node.all_input_nodes, node)
            for dims in self.links.outputs.get(each, ())
            if dims is not None
        ]
        present = {
            factor for dims in touched for dim in dims for factor in self.links.factors.leaves(dim)
        }
        return next(
            (
                factor
                for factor in self._divided
                if factor in present and runs_on_shares(self.links, node, factor)
            ),
            None,
        )

    # Values

    def _forget_gathered(self) -> None:
        """Forget values gathered along positions, so that backward gathers them again. Keeping them
        would defeat the division.
        """
        for node in self._gathered:
            del self._values[node][Unsharded.WHOLE]
        self._gathered.clear()

    def value(self, node: Node, place: Place) -> Node:
        """Return a value of the step graph at a place."""
        by_place = self._values[node]
        if place not in by_place:
            by_place[place] = self._move(node, by_place, place)
        return by_place[place]

    def _move(self, node: Node, by_place: Mapping[Place, Node], place: Place) -> Node:
        dims = self.links.dims(node)
        if place is Unsharded.WHOLE:
            have = Unsharded.TERM if Unsharded.TERM in by_place else next(iter(by_place))
            value = by_place[have]
            if have is Unsharded.TERM:
                return self._summed(node, "all_reduce", self.emit.reduced(value))
            assert isinstance(have, Factor)
            if have is self._position_factor:
                self._gathered.append(node)
                # gather its source once for all views of it
                if getattr(node.target, "overloadpacket", None) in _MOVES:
                    return self._call(
                        node,
                        torch.fx.node.map_arg(node.args, lambda s: self.value(s, Unsharded.WHOLE)),
                        node.kwargs,
                    )
            return self._record_exchange(
                node, "all_gather", self.emit.gathered(value, self._layout(dims, have))
            )
        assert isinstance(place, Factor), f"{node} is wanted as a term"
        layout = self._layout(dims, place)
        if Unsharded.TERM in by_place and Unsharded.WHOLE not in by_place:
            return self._summed(
                node, "reduce_scatter", self.emit.scattered(by_place[Unsharded.TERM], layout)
            )
        return self.emit.own_share(self.value(node, Unsharded.WHOLE), layout)

    def _layout(self, dims: Dims, factor: Factor) -> ShareLayout:
        layout = position(self.links.factors, dims, factor, self._ranks)
        assert layout is not None
        return layout

    def _dim(self, dims: Dims | None, place: Place) -> int | None:
        """Return the dim of which each rank has a share, or None."""
        layout = (
            position(self.links.factors, dims or (), place, self._ranks)
            if isinstance(place, Factor)
            else None
        )
        return None if layout is None else layout.dim

    def _summed(self, node: Node, collective: str, result: Node) -> Node:
        """Record the exchange that sums the terms of a value. Its result, not the term of a rank,
        is what the user's module returns.
        """
        inherit_origin(result, node)
        return self._record_exchange(node, collective, result)

    def _record_exchange(self, node: Node, collective: str, result: Node) -> Node:
        value = result.meta["val"]
        sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        by_rows = not all(isinstance(size, int) for size in value.shape)
        self._exchanges.append(
            Exchange(node.name, collective, math.prod(sizes), value.itemsize, by_rows)
        )
        return result

    # Nodes

    def _run(self, node: Node) -> None:
        if node.target is operator.getitem and node.args[0] in self._items:
            result, place = self._items[node.args[0]][node.args[1]]  # type: ignore[index]
            self._values[node] = {place: result}
        elif not holds_tensors(node):
            self._values[node] = {Unsharded.WHOLE: self._copy_size(node)}
        elif (
            node.target is operator.getitem
            or (active := self._active(node)) is None
            or (active is self._position_factor and self._passes_terms(node))
        ):
            self._run_whole(node)
        elif self.is_among(self.links.use(node).special, active):
            self._store(node, SPECIAL[node.target](self, node, active))
        else:
            self._store(node, self._run_share(node, active))

    def _store(self, node: Node, results: Results) -> None:
        values = (
            node.meta["val"] if isinstance(node.meta["val"], tuple | list) else (node.meta["val"],)
        )
        for (result, place), whole, dims in zip(
            results, values, self.links.outputs[node], strict=True
        ):
            if dims is not None and whole is not None:  # None: a gradient that is not needed
                divided = self._dim(dims, place)
                expected = [
                    n // self._ranks if at == divided else n for at, n in enumerate(whole.shape)
                ]
                assert list(result.meta["val"].shape) == expected, (
                    f"{node.format_node()}: {place}: {expected}, got"
                    f" {list(result.meta['val'].shape)}"
                )
        if isinstance(node.meta["val"], tuple | list):
            self._items[node] = results
        else:
            ((result, place),) = results
            self._values[node] = {place: result}

    def _copy_size(self, node: Node) -> Node:
        """Copy a computation of sizes, which are those of whole tensors on every rank."""
        if node.target is not aten.sym_size.int:
            return self.emit.graph.node_copy(
                node, lambda source: self.value(source, Unsharded.WHOLE)
            )
        source, at = node.args
        ((place, value),) = list(self._values[source].items())[:1]  # type: ignore[index]
        size = self.emit.call(aten.sym_size.int, value, at)
        divided = self._dim(self.links.dims(source), place)  # type: ignore[arg-type]
        return self.emit.times(size, self._ranks) if divided == at else size

    def _run_whole(self, node: Node) -> None:
        passes = self._passes_terms(node)
        if passes or getattr(node.target, "overloadpacket", None) in _VIEWS:
            args = torch.fx.node.map_arg(
                node.args,
                lambda s: self.value(
                    s, Unsharded.TERM if passes and self._is_term(s) else Unsharded.WHOLE
                ),
            )
            result = self._call(node, args, node.kwargs)
        else:
            result = self.emit.graph.node_copy(
                node, lambda source: self.value(source, Unsharded.WHOLE)
            )
        self._values[node] = {Unsharded.TERM if passes else Unsharded.WHOLE: result}
        if (
            not passes
            and node.target is not operator.getitem
            and getattr(node.target, "overloadpacket", None) not in _MOVES
        ):
            self._whole.append(node)

    def _is_term(self, source: Node) -> bool:
        return Unsharded.TERM in self._values.get(source, {}) and len(source.users) == 1

    def _passes_terms(self, node: Node) -> bool:
        """Return True if terms of a node's operands yield terms of its result, so that they are
        reduced once, after it.

        Nothing else may use these operands.
        """
        sources = node.all_input_nodes
        if getattr(node.target, "overloadpacket", None) in _LINEAR:
            return bool(sources) and self._is_term(sources[0])
        return (
            node.target in _SUMS
            and len(sources) == 2
            and all(map(self._is_term, sources))
            and self._same_shape(node, sources)
        )

    def _call(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Node:
        """Append a node's operator, with operands whose strides may differ from the original
        ones.
        """
        target: Any = node.target
        if target.overloadpacket in _VIEWS:
            target = aten.reshape.default
        if target is aten.baddbmm.default:
            added, left, right = args[:3]
            scale = {"beta": 1, "alpha": 1} | dict(kwargs)
            product = self.emit.call(aten.bmm.default, left, right, like=node)
            return self.emit.call(
                aten.add.Tensor,
                self.emit.call(aten.mul.Tensor, added, scale["beta"]),
                product,
                like=node,
                alpha=scale["alpha"],
            )
        return self.emit.call(target, *args, like=node, **kwargs)

    def _same_shape(self, node: Node, sources: Sequence[Node]) -> bool:
        return all(s.meta["val"].shape == node.meta["val"].shape for s in sources)

    def _run_share(self, node: Node, active: Factor) -> Results:
        """Run an operator on shares of the operands that have the factor."""
        use = self.links.use(node)
        contracted = [self.is_among(factors, active) for factors in use.contracted] + [False] * len(
            self.links.outputs[node]
        )

        def operand(source: Node) -> Node:
            if not self.links.has_dims(source):
                return self.value(source, Unsharded.WHOLE)
            value = self.value(
                source,
                active if self.links.holds(self.links.dims(source), active) else Unsharded.WHOLE,
            )
            return self.emit.only_first(value) if contracted[0] and source in use.once else value

        args = list(torch.fx.node.map_arg(tuple(node.args), operand))
        self._divide_sizes(node, args, active)
        result = self._call(node, args, torch.fx.node.map_arg(dict(node.kwargs), operand))
        if node.target in (aten.mean.dim, aten.mean.default) and contracted[0]:
            result = self.emit.call(aten.div.Scalar, result, self._ranks)
        places: list[Place] = []
        for dims, is_term in zip(self.links.outputs[node], contracted, strict=False):
            places.append(
                active
                if self.links.holds(dims, active)
                else Unsharded.TERM
                if is_term
                else Unsharded.WHOLE
            )
        return (
            self.items(result, places)
            if isinstance(node.meta["val"], tuple | list)
            else [(result, places[0])]
        )

    def items(self, node: Node, places: Sequence[Place]) -> Results:
        """Return the outputs of a node that has several, and their places."""
        values = node.meta["val"]
        return [
            (node if value is None else self.emit.call(operator.getitem, node, number), place)
            for number, (value, place) in enumerate(zip(values, places, strict=True))
        ]

    def _divide_sizes(self, node: Node, args: list[Any], active: Factor) -> None:
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        if packet in _SIZES:
            (dims,) = self.links.outputs[node]
            at = self._dim(dims, active)
            if at is not None:
                sizes = list(args[_SIZES[packet]])
                sizes[at] = self.emit.part(sizes[at], self._ranks)
                args[_SIZES[packet]] = sizes
        if (
            packet is aten.convolution_backward
            and args[3] is not None
            and self.links.holds(self.links.outputs[node][2], active)
        ):
            args[3] = [self.emit.part(n, self._ranks) for n in args[3]]
        if packet in (aten.split, aten.split_with_sizes):
            first = self.links.outputs[node][0]
            named_args = arguments(node)
            at = self._dim(first, active)
            if at is not None and at == named_args["dim"] % len(first or ()):
                lengths = args[1]
                parts = [
                    self.emit.part(n, self._ranks)
                    for n in (lengths if isinstance(lengths, list | tuple) else [lengths])
                ]
                args[1] = parts if isinstance(lengths, list | tuple) else parts[0]


def divisions(links: Links, node: Node, ranks: int) -> Iterator[tuple[Factor, Shard]]:
    """Yield the divisions of a parameter whose shares the graph keeps apart, each with the factor
    that it divides.
    """
    for at, dim in enumerate(links.dims(node)):
        blocks = 1
        for leaf in links.factors.leaves(dim):
            if not isinstance(leaf.size, int):
                break
            if can_share(links, leaf, ranks):
                yield leaf, Shard(dim=at, blocks=blocks)
            blocks *= leaf.size


def can_share(links: Links, factor: Factor, ranks: int) -> bool:
    """Return True if a factor can be divided into equal shares."""
    return (
        isinstance(factor.size, int)
        and factor.size % ranks == 0
        and not links.factors.is_broken(factor)
    )
