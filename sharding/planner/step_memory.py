"""Memory of a rank over an update, by kind: what `plan_costs` gives the peak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import ADDED, TANGENT, Port, Role
from trainload.autograd_trace.recompute.host_copies import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from trainload.packaging.package import Package
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.liveness import Storages, moments
from trainload.sharding.analysis.node_costs import Sizes
from trainload.sharding.pipeline.stages import Part
from trainload.sharding.planner.device import DeviceProfile
from trainload.sharding.planner.plan_costs import RankCosts, TimedAction, pipeline_actions, spans_of
from trainload.sharding.planner.rank_timeline import Timeline
from trainload.sharding.plans.estimate import of_rank
from trainload.sharding.plans.plan import PIPELINE, Plan
from trainload.sharding.rewriting.rank_graphs import (
    RankGraphs,
    phases,
    train_name,
    update_name,
    update_owners,
)

Work = Literal["step", "forward", "backward", "update"]
_COPIES = (OFFLOAD, OFFLOADED, RELOAD, RELOADED)


class Kind(IntEnum):
    """Kind of memory, in the order in which charts stack them."""

    PARAMETERS = 0
    """Parameters that the rank stores."""
    OPTIMIZER = 1
    """State of the optimizer."""
    GRADIENTS = 2
    """Gradients of parameters, also before and while they are reduced."""
    ACTIVATIONS = 3
    """Values of the step: what is kept for backward, and what exists for a moment."""
    GATHERED = 4
    """Whole parameters that were gathered or converted for their use."""
    OTHER = 5
    """Buffers, rows of the data, and values of the update."""


Held = tuple[int, ...]
"""Bytes of each kind."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a graph within an update.

    Attributes:
        title: description of the call, such as "microbatch 1" or the pipeline's action "0F3".
        work: what it computes.
        start: time at which it begins, in seconds after the beginning of the update; without a
            device, the number of operators before it.
        length: its duration, in the same unit.
        line: times of its operators; None without a device.
        times: time of each operator, from the beginning of the call.
        held: memory of the rank while each operator runs.
        backward: index in `times` at which backward begins; None if it is in another call.
    """

    title: str
    work: Work
    start: float
    length: float
    line: Timeline | None
    times: tuple[float, ...]
    held: tuple[Held, ...]
    backward: int | None


@dataclass(frozen=True, slots=True)
class RankStep:
    """An update on the ranks at one place of the pipeline.

    Attributes:
        index: the place, 0 without a pipeline.
        calls: calls of graphs, in order. Without a pipeline, of more than two microbatches only the
            first and the last are here, since the others are as the first.
        left_out: number of microbatches that are left out.
        length: duration of the update, with those that are left out.
        reserved: memory of the process besides its tensors, which no kind contains.
    """

    index: int
    calls: tuple[Call, ...]
    left_out: int
    length: float
    reserved: int

    @property
    def peak(self) -> Held:
        """Memory by kind at the peak."""
        return max((held for call in self.calls for held in call.held), key=sum)


def rank_steps(
    package: Package,
    plan: Plan,
    ranks: Sequence[RankGraphs],
    device: DeviceProfile | None,
    *,
    compiled: bool = True,
) -> tuple[RankStep, ...]:
    """Return an update on one rank of each place of the pipeline, in order.

    Law: the sum of a rank's peak, with `reserved`, is the peak of `costs`.

    Args:
        package: the package.
        plan: the plan.
        ranks: graphs of each pipeline rank, in order; of one rank if there is no pipeline.
        device: device of each rank; None if only its kind is known, which gives no times.
        compiled: True if graphs are compiled.
    """
    spans = spans_of(plan)
    rank_costs = [
        RankCosts(package, plan, graphs, device, spans, index, compiled=compiled)
        for index, graphs in enumerate(ranks)
    ]
    timed: list[list[TimedAction]] | None = None
    if plan.pipeline is not None and device is not None:
        timed = pipeline_actions(plan, rank_costs, device, spans[PIPELINE])
    steps = [
        _Step(package, plan, rank, index, None if timed is None else timed[index])
        for index, rank in enumerate(rank_costs)
    ]
    last = max(step.end for step in steps)
    return tuple(step.finished(last if plan.pipeline is not None else step.end) for step in steps)


class _Step:
    """The calls of one rank, before and after the update."""

    def __init__(
        self,
        package: Package,
        plan: Plan,
        rank: RankCosts,
        index: int,
        timed: Sequence[TimedAction] | None,
    ) -> None:
        self._package, self._plan, self._rank, self._index = package, plan, rank, index
        self._own = of_rank(plan, package, index)
        self._cache: dict[str, tuple[tuple[Held, ...], int | None]] = {}
        self._calls: list[Call] = []
        self._left_out = 0
        self._skipped = 0.0
        self.end = 0.0
        if plan.pipeline is not None:
            self._run_pipeline(timed)

    def finished(self, start: float) -> RankStep:
        """Return the step, whose graphs (the update, with a pipeline) begin at this time."""
        self.end = start
        owners = update_owners(self._package)
        for graph in self._package.manifest.training_graphs():
            if self._plan.pipeline is None:
                self._run_microbatches(graph)
            self._add("update", "update", update_name(owners[graph]), self._own.gradient_bytes)
        return RankStep(
            self._index,
            tuple(self._calls),
            self._left_out,
            self.end + self._skipped,
            self._rank.reserved,
        )

    def _run_microbatches(self, graph: str) -> None:
        count = self._plan.accumulate
        gradients = self._own.gradient_bytes if count > 1 else 0
        names = [train_name(graph, phase) for phase in phases(self._plan)]
        self._left_out = max(0, count - 2)
        for number, name in zip((1, count), names, strict=False):
            self._add(f"{graph}, microbatch {number} of {count}", "step", name, gradients)
            if number == 1:
                self._skipped += self._left_out * self._calls[-1].length

    def _run_pipeline(self, timed: Sequence[TimedAction] | None) -> None:
        starts = {str(each.action): each.start for each in timed or ()}
        for action, name, others in self._rank.kept_between():
            self._close(others)
            self.end = starts.get(str(action), self.end)
            work: Work = "forward" if action.part is Part.FORWARD else "backward"
            self._add(str(action), work, name, self._own.gradient_bytes, others)

    def _add(self, title: str, work: Work, name: str, gradients: int, kept: int = 0) -> None:
        line = self._rank.lines.get(name)
        curve, backward = self._curve(name, is_backward=work == "backward")
        beside = self._beside(gradients, kept)
        held = tuple(
            tuple(own + more for own, more in zip(each, beside, strict=True)) for each in curve
        ) or (beside,)
        times = tuple(float(at) for at in range(len(held))) if line is None else _times(line)
        length = float(len(held)) if line is None else line.seconds
        times = times or (0.0,)
        self._calls.append(Call(title, work, self.end, length, line, times, held, backward))
        self.end += length

    def _beside(self, gradients: int, kept: int) -> Held:
        """Return what the rank holds besides the values of a running graph."""
        beside = dict.fromkeys(Kind, 0)
        beside[Kind.PARAMETERS] = self._own.parameter_bytes
        beside[Kind.OPTIMIZER] = self._own.optimizer_bytes
        beside[Kind.GRADIENTS] = gradients
        beside[Kind.ACTIVATIONS] = kept
        beside[Kind.OTHER] = self._rank.buffers
        return tuple(beside.values())

    def _close(self, kept: int) -> None:
        """End the previous action with what is kept until the next one."""
        if self._calls:
            last = self._calls[-1]
            held = (*last.held, self._beside(self._own.gradient_bytes, kept))
            self._calls[-1] = replace(last, times=(*last.times, last.length), held=held)

    def _curve(self, name: str, *, is_backward: bool) -> tuple[tuple[Held, ...], int | None]:
        """Return the memory of a graph by kind at each operator, and the index of the first one of
        backward.
        """
        if name not in self._cache:
            graph = self._rank.graphs.ranks.get(name)
            sizes = self._rank.sizes.get(name, {})
            if graph is None:
                owner = name.removesuffix(update_name(""))
                module = self._rank.graphs.updates[owner]
                self._cache[name] = _by_kind(module, None, sizes, is_backward=False), None
            else:
                nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
                begin = next((at for at, node in enumerate(nodes) if node.name == TANGENT), None)
                curve = _by_kind(graph.module, graph.inputs, sizes, is_backward=is_backward)
                self._cache[name] = curve, begin
        return self._cache[name]


def _times(line: Timeline) -> tuple[float, ...]:
    """Return the time at which each operator's turn comes: collectives and copies that begin later,
    since their stream is busy, are issued when the operators before them have run.
    """
    now = 0.0
    times = []
    for row in line.rows:
        if row.why not in ("link", "host"):
            now = row.start
        times.append(now)
    return tuple(times)


def _by_kind(
    module: GraphModule, inputs: Sequence[Port] | None, sizes: Sizes, *, is_backward: bool
) -> tuple[Held, ...]:
    """Return the bytes that a graph holds in addition to its inputs, by kind, while each of its
    operators runs.

    Args:
        module: the graph.
        inputs: its inputs; None for an update.
        sizes: the value of each symbol.
        is_backward: True if all of it is backward; otherwise backward begins at `TANGENT`.
    """
    storages = Storages(module, sizes)
    kinds = _kinds(module, inputs, storages, is_backward=is_backward)
    now = [0] * len(Kind)
    curve: list[Held] = []
    for moment in moments(module, storages, sizes):
        for storage in moment.allocated:
            now[kinds.get(storage, Kind.ACTIVATIONS)] += storages.bytes[storage]
        if moment.node.op == "call_function":
            inside = Kind.OTHER if inputs is None else Kind.ACTIVATIONS
            curve.append(tuple(n + moment.inside * (at == inside) for at, n in enumerate(now)))
        for storage in moment.freed:
            now[kinds.get(storage, Kind.ACTIVATIONS)] -= storages.bytes[storage]
    return tuple(curve)


def _kinds(
    module: GraphModule, inputs: Sequence[Port] | None, storages: Storages, *, is_backward: bool
) -> dict[int, Kind]:
    """Return storage -> its kind; storages of activations may be missing."""
    if inputs is None:
        return dict.fromkeys(range(len(storages.bytes)), Kind.OTHER)
    kinds: dict[int, Kind] = {}
    placeholders, _ = ends(module)
    weights = {
        node for node, port in zip(placeholders, inputs, strict=True) if port.role is Role.BUCKET
    }
    backward: set[Node] = set()
    for node in module.graph.nodes:
        is_backward = is_backward or node.name == TANGENT
        if is_backward:
            backward.add(node)
        if ADDED not in node.meta or node.target in _COPIES:
            continue
        if weights.intersection(node.all_input_nodes):
            weights.add(node)
            kinds |= dict.fromkeys(storages.allocated.get(node, ()), Kind.GATHERED)
        elif is_backward:
            # the flat gradient of a bucket, and the gradients that it is made of
            kinds |= dict.fromkeys(storages.allocated.get(node, ()), Kind.GRADIENTS)
            for source in node.all_input_nodes:
                if source in backward and ADDED not in source.meta:
                    own = (s for s in storages.of.get(source, ()) if s is not None)
                    kinds |= {s: Kind.GRADIENTS for s in own if s not in kinds}
    return kinds
