"""Parameters of a rank's graph, as views of its buckets, which are gathered if they are sharded.

A parameter that is only converted to a smaller dtype before its use, as under autocast, is
converted with its bucket, in one kernel. If that is so for all of a bucket, its shares are
converted before the gather, which then sends fewer bytes. Values are the same, since conversion
works element by element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from trainload.autograd_trace.graph_calls import converted
from trainload.capture.operators import is_overload, is_seeded
from trainload.sharding.plans.plan import Bucket, Plan, Slot

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Gather = tuple[str, torch.dtype]
"""(bucket, dtype): a bucket that is gathered in a dtype."""
_Need = tuple[Bucket, Slot, torch.dtype]
"""A parameter, and the dtype in which a node needs it."""
_CONVERTED_AT_ONCE = 0.5
"""A bucket is converted as a whole if more than this part of it is."""


class Weights:
    """The parameters of a graph that is being rewritten.

    Args:
        plan: the plan.
        graph: the new graph.
        call: appends a call to it.
        parameters: node of the step graph -> the parameter that it is.
        stored: bucket -> the new graph's node of what the rank stores of it.
        body: the step graph's nodes, except inputs and outputs.
        results: the nodes that it returns.

    Attributes:
        sharded: True if buckets are gathered.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        call: Callable[..., Node],
        parameters: Mapping[Node, str],
        stored: Mapping[str, Node],
        body: Sequence[Node],
        results: Collection[Node],
    ) -> None:
        self._plan, self._graph, self._call = plan, graph, call
        self._parameters, self._stored, self._body = parameters, stored, body
        self.sharded = plan.shards_parameters and plan.shard_degree > 1
        self._slots = {s.parameter: (b, s) for b in plan.buckets for s in b.slots}
        self._derived = self._find_derived(set(results))
        self._weights: dict[Node, Node] = {}
        self._whole: dict[Gather, Node] = {}
        self._in_flight: dict[Gather, Node] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._converted: set[Gather] = set()

    def __contains__(self, node: Node) -> bool:
        """Return True for a parameter, and for what is computed from parameters only."""
        return node in self._derived or node in self._parameters

    def _find_derived(self, results: set[Node]) -> set[Node]:
        """Return nodes that are computed from parameters only (casts, transposes).

        They are computed separately for forward and for backward, so that no full weight is kept
        from one to the other.
        """
        derived: set[Node] = set()
        for node in self._body:
            sources = node.all_input_nodes
            if (
                sources
                and all(s in derived or s in self._parameters for s in sources)
                and node not in results
                and is_overload(node.target)
                and not is_seeded(node.target)
                and not node.target._schema.is_mutable
            ):
                derived.add(node)
        return derived

    # Gathers

    def gathers(self, start: int, stop: int) -> dict[int, list[Gather]]:
        """Return index of a node -> the gathers that start before it, for a part of the body in
        which no bucket is whole yet.
        """
        self._weights.clear()
        self._whole.clear()
        part = range(start, stop) if self.sharded else range(len(self._body))
        needed = {index: list(self._needed(index)) for index in part}
        self._choose_dtypes(needed)
        if not self.sharded:
            return {}
        first_use: dict[str, int] = {}
        for index, parameters in needed.items():
            for bucket in sorted({bucket.name for bucket, _, _ in parameters}):
                first_use.setdefault(bucket, index)
        ordered = sorted(first_use, key=lambda name: (first_use[name], name))
        launches: dict[int, list[Gather]] = {}
        for number, name in enumerate(ordered):
            ahead = number - self._plan.prefetch
            at = first_use[ordered[ahead]] if ahead >= 0 else start
            launches.setdefault(at, []).append((name, self._dtypes[name]))
        return launches

    def launch(self, gather: Gather) -> None:
        """Start a gather."""
        name, dtype = gather
        self._in_flight[gather] = self._call(
            c10d.all_gather_into_tensor.default,
            converted(self._call, self._stored[name], dtype),
            self._plan.shard_degree,
            self._plan.shard_group,
        )

    def _choose_dtypes(self, needed: Mapping[int, Sequence[_Need]]) -> None:
        """Choose the dtype in which each bucket is gathered for a part of the body, and the buckets
        that are converted at once.
        """
        self._converted.clear()
        by_bucket: dict[str, dict[torch.dtype, set[Slot]]] = {}
        buckets: dict[str, Bucket] = {}
        for bucket, slot, dtype in itertools.chain.from_iterable(needed.values()):
            buckets[bucket.name] = bucket
            by_bucket.setdefault(bucket.name, {}).setdefault(dtype, set()).add(slot)
        for name, slots in by_bucket.items():
            own = self._stored[name].meta["val"].dtype
            (first, *others) = slots
            smaller = not others and first.itemsize < own.itemsize
            self._dtypes[name] = first if smaller and self.sharded else own
            self._converted |= {
                (name, dtype)
                for dtype, converted in slots.items()
                if dtype != own
                and sum(slot.length for slot in converted)
                > _CONVERTED_AT_ONCE * buckets[name].length
            }

    def _needed(self, index: int) -> Iterator[_Need]:
        """Yield the parameters that a node needs, also through derived nodes, and the dtype in
        which it needs them.
        """
        if self._body[index] in self._derived:
            return
        stack, seen = list(self._body[index].all_input_nodes), set[Node]()
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self._parameters:
                yield (*self._slots[self._parameters[source]], source.meta["val"].dtype)
            elif (parameter := self._converts(source)) is not None:
                yield (*self._slots[self._parameters[parameter]], source.meta["val"].dtype)
            elif source in self._derived:
                stack.extend(source.all_input_nodes)

    def _converts(self, node: Node) -> Node | None:
        """Return the parameter that a node converts to another dtype, or None."""
        is_conversion = node.target is aten._to_copy.default and {*node.kwargs} == {"dtype"}
        if not is_conversion or node not in self._derived:
            return None
        source = node.args[0]
        return source if isinstance(source, Node) and source in self._parameters else None

    # Values

    def value(self, node: Node) -> Node:
        """Return the current part's copy of a parameter or of a node derived from parameters."""
        stack = [node]
        # not recursive: a chain over all parameters, such as a penalty's sum, is too long
        while stack:
            here = stack[-1]
            if here in self._weights:
                stack.pop()
                continue
            view = self._view(here)
            if view is not None:
                self._weights[here] = view
                continue
            missing = [s for s in here.all_input_nodes if s not in self._weights]
            stack += missing
            if not missing:
                self._weights[here] = self._graph.node_copy(here, self._weights.__getitem__)
        return self._weights[node]

    def _view(self, node: Node) -> Node | None:
        """Return a view of a bucket for a parameter, or for one that is converted with its bucket;
        None for other nodes.
        """
        parameter = node if node in self._parameters else self._converts(node)
        if parameter is None:
            return None
        bucket, slot = self._slots[self._parameters[parameter]]
        key = bucket.name, node.meta["val"].dtype
        is_whole = parameter is node or key in self._converted or key[1] == self._dtypes.get(key[0])
        if not is_whole:
            return None
        flat = self._call(
            aten.slice.Tensor, self._bucket(*key), 0, slot.offset, slot.offset + slot.length
        )
        return self._call(aten.view.default, flat, list(slot.shape))

    def _bucket(self, name: str, dtype: torch.dtype) -> Node:
        """Return the whole bucket in a dtype."""
        key, own = (name, dtype), self._stored[name].meta["val"].dtype
        if key not in self._whole:
            if not self.sharded:
                self._whole[key] = converted(self._call, self._stored[name], dtype)
            elif dtype in (own, self._dtypes.get(name)):
                if key not in self._in_flight:
                    # a parameter that is an output: no operator of the graph uses it
                    self.launch(key)
                self._whole[key] = self._call(c10d.wait_tensor.default, self._in_flight.pop(key))
            else:
                self._whole[key] = converted(self._call, self._bucket(name, own), dtype)
        return self._whole[key]
