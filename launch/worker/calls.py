"""Calls graphs for one rank: finds each input by its role, and keeps what a call changes."""

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
from trainload.launching.node.build import BuiltGraph
from trainload.launching.worker.rank_state import RankState
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan
from trainload.sharding.rewriting.rewrite import BETWEEN, accumulated_length


def ignore(graph: str) -> None:
    """For callers whom nobody watches."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The rows of one call of a step graph.

    Attributes:
        batch: name -> (rows, ...) tensor on the CPU.
        row: the number of its first row within the global batch.
        rows: (n,) int64 numbers of its rows in their data set; None where there is none.
        part: number of the part of the run's data that they are of.
    """

    batch: Mapping[str, Tensor]
    row: int
    rows: Rows | None = None
    part: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """What a call is given beside a microbatch.

    Attributes:
        turn: which turn of which graph it is.
        number: of the microbatch, within its draw.
        fed: what graphs have computed for others in this round, by "graph.output", one tensor for each microbatch.
        gradients: bucket -> its gradient so far; the call's is put in its place.
        between: values by name that graphs of a pipeline's stage take of one another; what the call puts out is added.
    """

    turn: TurnCall
    number: int
    fed: Mapping[str, Sequence[Tensor]]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    between: dict[str, Tensor] = field(default_factory=dict)


class Calls:
    """Calls graphs with what a rank holds, and replaces what it holds by what they put out.

    Args:
        package: what is trained.
        plan: how.
        rank: this rank.
        device: where this rank computes.
        held: its state; it changes.
        on_call: told the name of each graph that is about to be called.
    """

    def __init__(
        self, package: Package, plan: Plan, rank: int, device: torch.device, held: RankState, on_call: Callable[[str], None] = ignore
    ) -> None:
        self._on_call = on_call
        self._recipe = package.recipe
        self._plan, self._rank, self._device, self._held = plan, rank, device, held
        self._buckets = {bucket.name: bucket for bucket in plan.buckets}

    def call(self, graph: BuiltGraph, microbatch: Microbatch, given: Given) -> dict[Role, list[Tensor]]:
        """Calls a graph. Returns: its outputs but for buffers, gradients and values between stages, which are kept."""
        arguments = [self._argument(port.role, port.name, microbatch, given) for port in graph.inputs]
        self._on_call(graph.name)
        with torch.no_grad():
            results = graph.call(*arguments)
        found: dict[Role, list[Tensor]] = {}
        for port, value in zip(graph.outputs, results, strict=True):
            if port.role is Role.BUFFER:
                self._held.buffers[port.name] = value.contiguous()  # as the graph was derived for
            elif port.role is Role.BUCKET_GRADIENT:
                given.gradients[port.name] = value
            elif port.role in BETWEEN:
                given.between[port.name] = value
            else:
                found.setdefault(port.role, []).append(value)
        return found

    def scale(self, graph: str) -> Tensor:
        """What a graph's loss is multiplied by before its gradient is taken: 0-dim float32."""
        scale = torch.tensor(1.0 / self._plan.global_batch, dtype=torch.float32, device=self._device)
        return scale * self._held.scaling[graph][0] if graph in self._held.scaling else scale

    def zero_gradient(self, name: str) -> Tensor:
        """What is accumulated of a bucket's gradient before the first microbatch."""
        bucket = self._buckets[name]
        return torch.zeros(accumulated_length(self._plan, bucket), dtype=getattr(torch, bucket.dtype), device=self._device)

    def _argument(self, role: Role, name: str, microbatch: Microbatch, given: Given) -> Tensor:
        graph = given.turn.graph
        match role:
            case Role.BUCKET:
                return self._held.params[name]
            case Role.BUCKET_GRADIENT:
                return given.gradients[name] if name in given.gradients else self.zero_gradient(name)
            case Role.BUFFER:
                return self._held.buffers[name]
            case Role.CONSTANT:
                return self._held.constants[name]
            case Role.BATCH:
                source = self._recipe.feeds.get(graph, {}).get(name)
                return microbatch.batch[name].to(self._device) if source is None else given.fed[source][given.number].contiguous()
            case Role.SCALE:
                return self.scale(graph)
            case Role.ACTIVATION | Role.COTANGENT | Role.SAVED:
                return given.between[name]
            case _:
                value = {
                    Role.SEED: seed_of(self._recipe.seed, graph),
                    Role.STEP: given.turn.count,
                    Role.ROW: microbatch.row,
                    Role.TENSOR_RANK: self._plan.tensor_index(self._rank),
                }[role]
                return torch.tensor(value, dtype=torch.int64, device=self._device)


def seed_of(seed: int, graph: str) -> int:
    """The seed of a graph's random numbers: graphs of one job draw apart, the one of a job that has one by the job's own seed."""
    return seed if graph == MAIN else seed + int.from_bytes(hashlib.sha256(graph.encode()).digest()[:6])
