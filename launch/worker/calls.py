"""Call graphs on one rank: look up each input by its role, and store what a call changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainload.autograd_trace.graphs import Role
from trainload.autograd_trace.optimizer.rounds import TurnCall
from trainload.capture.program import MAIN
from trainload.launching.data.sampler import Rows
from trainload.launching.node.built_graphs import BuiltGraph
from trainload.launching.node.device_values import moved_to, scalar_on
from trainload.launching.worker.rank_state import RankState
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan
from trainload.sharding.rewriting.rewrite import BETWEEN, accumulated_length


def ignore(graph: str) -> None:
    """Do nothing: the default callback."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows for one call of a step graph.

    Attributes:
        batch: name -> (rows, ...) tensor on the CPU.
        row: number of its first row within the global batch.
        rows: (n,) int64 numbers of its rows in their dataset; None if there is no dataset.
        part: number of the part of the run's data to which they belong.
    """

    batch: Mapping[str, Tensor]
    row: int
    rows: Rows | None = None
    part: int = 0


@dataclass(frozen=True, slots=True)
class CallContext:
    """Inputs of a call beside a microbatch.

    Attributes:
        turn: graph and turn of the call.
        number: number of the microbatch within its draw.
        fed: outputs of graphs for other graphs in this round, by "graph.output", one tensor for
            each microbatch.
        gradients: bucket -> its gradient so far, which the call replaces.
        between: values by name that the graphs of a pipeline's stages pass to each other; the call
            adds its own.
    """

    turn: TurnCall
    number: int
    fed: Mapping[str, Sequence[Tensor]]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    between: dict[str, Tensor] = field(default_factory=dict)


class Calls:
    """Caller of graphs with a rank's state, which their outputs update.

    Args:
        package: package that is trained.
        plan: plan of the run.
        rank: this rank.
        device: device of this rank.
        state: state of this rank; it is modified.
        on_call: called with the name of each graph before the graph is called.

    Attributes:
        microbatch: microbatch of the last call; None before the first.
    """

    def __init__(
        self,
        package: Package,
        plan: Plan,
        rank: int,
        device: torch.device,
        state: RankState,
        on_call: Callable[[str], None] = ignore,
    ) -> None:
        self._on_call = on_call
        self._recipe = package.recipe
        self._plan, self._rank, self._device, self._state = plan, rank, device, state
        self._buckets = {bucket.name: bucket for bucket in plan.buckets}
        self.microbatch: Microbatch | None = None

    def call(
        self, graph: BuiltGraph, microbatch: Microbatch, context: CallContext
    ) -> dict[Role, list[Tensor]]:
        """Call a graph, and return its outputs without buffers, gradients and values between
        stages, which are stored.
        """
        arguments = [
            self._argument(port.role, port.name, microbatch, context) for port in graph.inputs
        ]
        self._on_call(graph.name)
        self.microbatch = microbatch
        with torch.no_grad():
            results = graph.call(*arguments)
        outputs: dict[Role, list[Tensor]] = {}
        for port, value in zip(graph.outputs, results, strict=True):
            if port.role is Role.BUFFER:
                # the strides for which the graph was derived
                self._state.buffers[port.name] = value.contiguous()
            elif port.role is Role.BUCKET_GRADIENT:
                context.gradients[port.name] = value
            elif port.role in BETWEEN:
                context.between[port.name] = value
            else:
                outputs.setdefault(port.role, []).append(value)
        return outputs

    def scale(self, graph: str) -> Tensor:
        """Return the factor by which a graph's loss is multiplied before its gradient is computed:
        0-dim float32.
        """
        scale = scalar_on(self._device, 1.0 / self._plan.global_batch, torch.float32)
        return scale * self._state.scaling[graph][0] if graph in self._state.scaling else scale

    def zero_gradient(self, name: str) -> Tensor:
        """Return a bucket's accumulated gradient before the first microbatch: zeros."""
        bucket = self._buckets[name]
        return torch.zeros(
            accumulated_length(self._plan, bucket),
            dtype=getattr(torch, bucket.dtype),
            device=self._device,
        )

    def _argument(
        self, role: Role, name: str, microbatch: Microbatch, context: CallContext
    ) -> Tensor:
        graph = context.turn.graph
        match role:
            case Role.BUCKET:
                return self._state.params[name]
            case Role.BUCKET_GRADIENT:
                return (
                    context.gradients[name]
                    if name in context.gradients
                    else self.zero_gradient(name)
                )
            case Role.BUFFER:
                return self._state.buffers[name]
            case Role.CONSTANT:
                return self._state.constants[name]
            case Role.BATCH:
                source = self._recipe.feeds.get(graph, {}).get(name)
                return (
                    moved_to(self._device, microbatch.batch[name])
                    if source is None
                    else context.fed[source][context.number].contiguous()
                )
            case Role.SCALE:
                return self.scale(graph)
            case Role.ACTIVATION | Role.COTANGENT | Role.SAVED:
                return context.between[name]
            case _:
                value = {
                    Role.SEED: seed_of(self._recipe.seed, graph),
                    Role.STEP: context.turn.count,
                    Role.ROW: microbatch.row,
                    Role.TENSOR_RANK: self._plan.tensor_index(self._rank),
                }[role]
                return scalar_on(self._device, value, torch.int64)


def seed_of(seed: int, graph: str) -> int:
    """Return the seed of a graph's random numbers: each graph of a job has its own, the main graph
    the job's seed.
    """
    return (
        seed
        if graph == MAIN
        else seed + int.from_bytes(hashlib.sha256(graph.encode()).digest()[:6])
    )
