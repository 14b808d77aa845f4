"""Rewrite a step graph for the ranks of a plan: flat buckets in place of parameters, plus
collectives.

One graph serves all ranks: it contains no rank number, and the process group is a name that is
bound at launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.graph_calls import append, remove_dead_code
from trainload.autograd_trace.graphs import ADDED, TANGENT, Port, Role, StepGraph
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import (
    LazyGraphModule,
    computed_from,
    ends,
    mode_of,
)
from trainload.sharding.plans.plan import DATA, REPLICATE, Bucket, Plan
from trainload.sharding.rewriting.at_once import at_once
from trainload.sharding.rewriting.weights import Weights

aten = torch.ops.aten


class Phase(StrEnum):
    """Call of an accumulated step that a rewritten graph is for."""

    ONLY = "only"
    """The only microbatch of the step."""
    ACCUMULATE = "accumulate"
    """Add to the gradients so far; they stay local unless parameters are sharded."""
    SYNCHRONISE = "synchronise"
    """The last microbatch: add to the gradients so far and synchronise them over all ranks."""


BETWEEN = (Role.ACTIVATION, Role.COTANGENT, Role.SAVED)
"""Roles of values that go from one graph of a pipeline's stages to another."""


@dataclass(frozen=True, slots=True)
class RankGraph:
    """A step graph as every rank of a plan runs it.

    Laws: inputs are the buckets (each of `stored_length`), then, unless the phase is ONLY, the
    gradients so far (each of `accumulated_length`), then the other inputs of the step graph,
    without its parameters. Outputs are the totals (in a graph with a loss), the buffers, the
    predictions, then, in a graph with gradients, one flat gradient for each trained bucket, in plan
    order, and finally the values that a pipeline stage sends or saves. The graph of a stage has
    only the buckets that it uses and the gradients that it adds to.
    """

    module: GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def stored_length(plan: Plan, bucket: Bucket) -> int:
    """Return the number of elements of a bucket's parameters that one rank stores."""
    return bucket.length // plan.shard_degree if plan.shards_parameters else bucket.length


def update_length(plan: Plan, bucket: Bucket) -> int:
    """Return the number of elements of a bucket that one rank updates, which is that of its
    synchronised gradient.
    """
    return bucket.length // plan.shard_degree if plan.shards_state else bucket.length


def accumulated_length(plan: Plan, bucket: Bucket) -> int:
    """Return the number of elements of a bucket's gradient between microbatches."""
    return bucket.length // plan.shard_degree if plan.shards_gradients else bucket.length


def rewrite(
    step: StepGraph, plan: Plan, phase: Phase = Phase.ONLY, groups: Collection[str] | None = None
) -> RankGraph:
    """Rewrite a step graph (with or without gradients) for the ranks of a plan.

    Args:
        step: the graph; in a plan with a pipeline, a stage's (sharding/pipeline/stages.py).
        plan: distribution of its package.
        phase: call of an accumulated step that it is for. A stage's graph only accumulates: the
            update synchronises.
        groups: parameter groups that its gradient trains; gradients of other groups are left out,
            with the nodes that only they need. None for all.

    Raises:
        PlanError: a buffer would differ between ranks, or the plan lacks a parameter of the graph.
    """
    return _Rewriter(
        _without_untrained_gradients(step, plan, groups) if groups is not None else step,
        plan,
        phase,
        groups,
    ).run()


def _buckets_of(step: StepGraph, plan: Plan) -> tuple[Bucket, ...]:
    if plan.pipeline is None:
        return plan.buckets
    parameters = {
        port.name
        for port in (*step.inputs, *step.outputs)
        if port.role in (Role.PARAMETER, Role.GRADIENT)
    }
    return tuple(
        bucket
        for bucket in plan.buckets
        if any(slot.parameter in parameters for slot in bucket.slots)
    )


def _without_untrained_gradients(step: StepGraph, plan: Plan, groups: Collection[str]) -> StepGraph:
    """Return the step graph without the gradients of parameters that these groups do not train."""
    trained = {
        slot.parameter
        for bucket in plan.buckets
        if bucket.group_among(groups) is not None
        for slot in bucket.slots
    }
    selected = [port.role is not Role.GRADIENT or port.name in trained for port in step.outputs]
    if all(selected):
        return step
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in step.module.graph.nodes:
        if node.op == "output":
            graph.output(
                tuple(
                    copied[value]
                    for value, is_selected in zip(node.args[0], selected, strict=True)
                    if is_selected
                )
            )
        else:
            copied[node] = graph.node_copy(node, lambda source: copied[source])
    needed = {
        node for node in graph.nodes if node.op in ("placeholder", "output") or node.name == TANGENT
    }
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
        else:
            graph.erase_node(node)
    return StepGraph(
        LazyGraphModule(step.module, graph),
        step.inputs,
        tuple(p for p, is_selected in zip(step.outputs, selected, strict=True) if is_selected),
    )


class _Rewriter:
    def __init__(
        self, step: StepGraph, plan: Plan, phase: Phase, groups: Collection[str] | None
    ) -> None:
        self._buckets = _buckets_of(step, plan)
        self._trained = [
            b
            for b in self._buckets
            if (bool(b.groups) if groups is None else b.group_among(groups) is not None)
        ]
        if plan.pipeline is not None:
            differentiated = {port.name for port in step.outputs if port.role is Role.GRADIENT}
            self._trained = [
                b
                for b in self._trained
                if any(slot.parameter in differentiated for slot in b.slots)
            ]
        self._step = step
        self._plan = plan
        self._phase = phase
        self._graph = Graph()
        self._old = list(step.module.graph.nodes)
        self._placeholders, self._results = ends(step.module)
        self._body = [n for n in self._old if n.op not in ("placeholder", "output")]
        self._parameter = {
            n: port.name
            for n, port in zip(self._placeholders, step.inputs, strict=True)
            if port.role is Role.PARAMETER
        }
        self._mode = mode_of(self._placeholders)
        self._device = self._placeholders[0].meta["val"].device
        lacking = sorted(
            set(self._parameter.values()) - {s.parameter for b in plan.buckets for s in b.slots}
        )
        if lacking:
            raise PlanError(
                "the plan has no place for a parameter of the graph",
                where=lacking[0],
                hint="Make a plan for this package.",
            )

    def run(self) -> RankGraph:
        inputs = self._make_inputs()
        backward_from = next(
            (i for i, n in enumerate(self._body) if n.name == TANGENT), len(self._body)
        )
        weights = Weights(
            self._plan,
            self._graph,
            self._call,
            self._parameter,
            self._stored,
            self._body,
            self._results,
        )
        copied = dict(self._other)
        self._finished: dict[str, Node] = {}
        launches = weights.gathers(0, backward_from)
        gradients = self._gradient_schedule()
        reduced: dict[str, Node] = {}
        for index, node in enumerate(self._body):
            for gather in launches.get(index, ()):
                weights.launch(gather)
            if node not in weights:
                copied[node] = self._copy(node, weights, copied)
            if index == backward_from and weights.sharded:
                # After the node that begins the backward part, so that a gather is in the part that
                # needs it.
                launches = weights.gathers(backward_from + 1, len(self._body))
            for bucket in gradients.get(index, ()):
                reduced[bucket.name] = self._launch_reduction(bucket, copied)
                self._wait_for_earlier_reductions(reduced)
        # a part of a stage may only pass gradients on
        for bucket in self._trained if gradients and not self._body else ():
            reduced[bucket.name] = self._launch_reduction(bucket, copied)
        for node in self._results:
            if node in self._parameter:
                copied[node] = weights.value(node)
        return self._finish(inputs, copied, reduced)

    # Inputs

    def _make_inputs(self) -> tuple[Port, ...]:
        inputs: list[Port] = []
        self._stored: dict[str, Node] = {}
        self._so_far: dict[str, Node] = {}
        for bucket in self._buckets:
            self._stored[bucket.name] = self._placeholder(
                bucket, bucket.name, stored_length(self._plan, bucket)
            )
            inputs.append(Port(Role.BUCKET, bucket.name))
        if self._phase is not Phase.ONLY:
            for bucket in self._trained:
                self._so_far[bucket.name] = self._placeholder(
                    bucket, f"{bucket.name}_so_far", accumulated_length(self._plan, bucket)
                )
                inputs.append(Port(Role.BUCKET_GRADIENT, bucket.name))
        self._other: dict[Node, Node] = {}
        for node, port in zip(self._placeholders, self._step.inputs, strict=True):
            if port.role is not Role.PARAMETER:
                self._other[node] = self._graph.node_copy(node)
                inputs.append(port)
        return tuple(inputs)

    def _placeholder(self, bucket: Bucket, name: str, length: int) -> Node:
        node = self._graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(
                length, dtype=getattr(torch, bucket.dtype), device=self._device
            )
        return node

    # Parameters

    def _copy(self, node: Node, weights: Weights, copied: dict[Node, Node]) -> Node:
        values = {s: weights.value(s) for s in node.all_input_nodes if s in weights}
        return self._graph.node_copy(node, lambda n: values[n] if n in values else copied[n])

    # Gradients

    def _gradients(self) -> dict[str, Node]:
        return {
            p.name: n
            for p, n in zip(self._step.outputs, self._results, strict=True)
            if p.role is Role.GRADIENT
        }

    def _gradient_schedule(self) -> dict[int, list[Bucket]]:
        """Return index of a node -> buckets whose last gradient it is."""
        index = {n: i for i, n in enumerate(self._body)}
        computed_at = {name: index.get(node, 0) for name, node in self._gradients().items()}
        schedule: dict[int, list[Bucket]] = {}
        if computed_at:
            for bucket in self._trained:
                last = max(
                    (computed_at[s.parameter] for s in bucket.slots if s.parameter in computed_at),
                    default=len(self._body) - 1,
                )
                schedule.setdefault(last, []).append(bucket)
        return schedule

    def _launch_reduction(self, bucket: Bucket, copied: dict[Node, Node]) -> Node:
        """Return the bucket's flat gradient, or the collective of its strategy in flight."""
        gradients = self._gradients()
        pieces: list[Node] = []
        end = 0
        for slot in bucket.slots:
            if slot.offset > end:
                pieces.append(self._zeros(slot.offset - end, bucket.dtype))
            if slot.parameter in gradients:
                flat = self._call(
                    aten.reshape.default, copied[gradients[slot.parameter]], [slot.length]
                )
            else:
                flat = self._zeros(slot.length, bucket.dtype)
            pieces.append(flat)
            end = slot.offset + slot.length
        if bucket.length > end:
            pieces.append(self._zeros(bucket.length - end, bucket.dtype))
        flat = self._call(aten.cat.default, pieces) if len(pieces) > 1 else pieces[0]
        if self._plan.data_ranks == 1:
            return self._add_so_far(bucket, flat)
        if self._plan.shards_gradients:
            return self._reduce_scatter(flat)
        flat = self._add_so_far(bucket, flat)
        if self._phase is Phase.ACCUMULATE:
            return flat
        return (
            self._reduce_scatter(flat) if self._plan.shards_state else self._all_reduce(flat, DATA)
        )

    def _reduce_scatter(self, flat: Node) -> Node:
        ranks, group = self._plan.shard_degree, self._plan.shard_group
        return self._call(
            torch.ops._c10d_functional.reduce_scatter_tensor.default, flat, "sum", ranks, group
        )

    def _all_reduce(self, value: Node, group: str) -> Node:
        return self._call(torch.ops._c10d_functional.all_reduce.default, value, "sum", group)

    def _add_so_far(self, bucket: Bucket, flat: Node) -> Node:
        return (
            self._call(aten.add.Tensor, flat, self._so_far[bucket.name])
            if self._phase is not Phase.ONLY
            else flat
        )

    def _reduces_gradients(self) -> bool:
        """Return True if gradients are reduced in this graph."""
        return self._plan.data_ranks > 1 and (
            self._phase is not Phase.ACCUMULATE or self._plan.shards_gradients
        )

    def _wait_for_earlier_reductions(self, reduced: dict[str, Node]) -> None:
        """Wait for all but the last reductions. The input of a reduce-scatter, a whole gradient, is
        kept until then.
        """
        if not self._reduces_gradients() or not self._plan.shards_state:
            return
        for name in [name for name in reduced if name not in self._finished][
            : -max(1, self._plan.prefetch)
        ]:
            self._finished[name] = self._wait(reduced[name])

    def _wait_for_reductions(self, reduced: dict[str, Node]) -> dict[str, Node]:
        """Return bucket -> its gradient, after all communication."""
        if not self._reduces_gradients():
            return reduced
        finished = {
            name: self._finished.get(name) or self._wait(reduction)
            for name, reduction in reduced.items()
        }
        if self._plan.shards_gradients:
            finished = {
                bucket.name: self._add_so_far(bucket, finished[bucket.name])
                for bucket in self._trained
                if bucket.name in finished
            }
        if (
            self._phase is Phase.ACCUMULATE
            or not self._plan.shards_state
            or self._plan.replicas == 1
        ):
            return finished
        in_flight = {
            name: self._all_reduce(gradient, REPLICATE) for name, gradient in finished.items()
        }
        return {name: self._wait(gradient) for name, gradient in in_flight.items()}

    def _wait(self, node: Node) -> Node:
        return self._call(torch.ops._c10d_functional.wait_tensor.default, node)

    # Outputs

    def _finish(
        self, inputs: tuple[Port, ...], copied: dict[Node, Node], reduced: dict[str, Node]
    ) -> RankGraph:
        by_role: dict[Role, list[tuple[Port, Node]]] = {}
        for port, node in zip(self._step.outputs, self._results, strict=True):
            if port.role is not Role.GRADIENT:
                by_role.setdefault(port.role, []).append((port, copied[node]))
        outputs: list[Port] = []
        results: list[Node] = []
        if Role.LOSS in by_role:
            outputs.append(Port(Role.TOTALS, "totals"))
            results.append(self._totals(by_role))
        buffers = by_role.get(Role.BUFFER, [])
        outputs += [port for port, _ in buffers]
        results += self._synchronised_buffers(buffers)
        for port, node in by_role.get(Role.PREDICTION, ()):
            outputs.append(port)
            results.append(node)
        finished = self._wait_for_reductions(reduced)
        assert not self._gradients() or set(finished) == {
            bucket.name for bucket in self._trained
        }, "every trained bucket has its gradient"
        for bucket in self._trained:
            if bucket.name in finished:
                outputs.append(Port(Role.BUCKET_GRADIENT, bucket.name))
                results.append(finished[bucket.name])
        for port, node in [entry for role in BETWEEN for entry in by_role.get(role, ())]:
            outputs.append(port)
            results.append(node)
        output = self._graph.output(tuple(results))
        output.meta["val"] = tuple(r.meta["val"] for r in results)
        module = LazyGraphModule(self._step.module, self._graph)
        remove_dead_code(module.graph)
        module.graph.lint()
        return RankGraph(module=module, inputs=inputs, outputs=tuple(outputs))

    def _totals(self, by_role: dict[Role, list[tuple[Port, Node]]]) -> Node:
        ((_, weight),) = by_role[Role.WEIGHT]
        values = []
        for _, node in [*by_role[Role.LOSS], *by_role.get(Role.METRIC, ())]:
            as_float = self._call(aten._to_copy.default, node, dtype=torch.float32)
            values.append(self._call(aten.mul.Tensor, as_float, weight))
        totals = self._call(aten.stack.default, [*values, weight])
        if self._plan.data_ranks == 1:
            return totals
        return self._wait(self._all_reduce(totals, DATA))

    def _synchronised_buffers(self, buffers: Collection[tuple[Port, Node]]) -> list[Node]:
        """Return buffers that are equal on all ranks.

        Floating-point buffers become the mean over the ranks (as running statistics do), or the
        first rank's; others must change in the same way on every rank.
        """
        values = dict(buffers)
        if self._plan.data_ranks == 1:
            return list(values.values())
        floating = {p: n for p, n in buffers if n.meta["val"].is_floating_point()}
        for port in values.keys() - floating.keys():
            self._check_same_on_ranks(port)
        call, ranks, sends = self._call, self._plan.data_ranks, self._plan.batch_norm == "broadcast"
        send = torch.ops._c10d_functional.broadcast.default
        values |= at_once(
            floating,
            call,
            lambda flat: self._wait(
                call(send, flat, 0, DATA) if sends else self._all_reduce(flat, DATA)
            ),
            # buffers share no memory
            lambda part: (
                call(aten.clone.default, part) if sends else call(aten.div.Scalar, part, ranks)
            ),
        )
        return list(values.values())

    def _check_same_on_ranks(self, port: Port) -> None:
        """Raise PlanError if the new value of an integer buffer differs between ranks."""
        local = {
            n
            for n, p in zip(self._placeholders, self._step.inputs, strict=True)
            if p.role in (Role.BATCH, Role.ROW, *BETWEEN)
        }
        result = self._results[self._step.outputs.index(port)]
        if local & computed_from([result], values=True, owner=self._step.module):
            raise PlanError(
                "an integer buffer is computed from the batch, so every rank would have a different"
                " value",
                where=f"buffer {port.name}",
                expected=(
                    "a count that does not depend on the rank's rows, or a floating-point buffer"
                    " (ranks take the mean)"
                ),
                got=str(result.meta["val"].dtype),
                hint="Plan for one device, or keep the statistic as a floating-point mean.",
            )

    # New nodes

    def _zeros(self, length: int, dtype: str) -> Node:
        return self._call(
            aten.full.default, [length], 0.0, dtype=getattr(torch, dtype), device=self._device
        )

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = append(self._graph, self._mode, target, *args, **kwargs)
        node.meta[ADDED] = True
        return node
