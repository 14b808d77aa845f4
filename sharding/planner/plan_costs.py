"""Compute the costs of a plan on a device: the peak memory of a rank, and the seconds of an
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import SymInt
from torch.fx import GraphModule

from trainload.autograd_trace.graphs import Port, Role
from trainload.packaging.package import Package
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.liveness import GraphMemory, held
from trainload.sharding.pipeline.pipeline_axis import bytes_of as bytes_sent
from trainload.sharding.pipeline.stage_schedule import Action, Message, instructions, message_of
from trainload.sharding.pipeline.stages import Part
from trainload.sharding.planner.device import DeviceProfile, Span, seconds_of, span_of
from trainload.sharding.planner.rank_timeline import Timeline, timeline
from trainload.sharding.plans.buckets import item_bytes
from trainload.sharding.plans.estimate import of_rank
from trainload.sharding.plans.plan import PIPELINE, Plan
from trainload.sharding.rewriting.rank_graphs import (
    RankGraphs,
    phases,
    stage_name,
    train_name,
    update_name,
    update_owners,
)
from trainload.sharding.rewriting.rewrite import Phase, RankGraph


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one rank at its peak, in bytes.

    Attributes:
        parameters: always held.
        optimizer: always held.
        buffers: always held: the model's buffers and constants, and the rows of an update.
        gradients: held at the peak in addition to the values of a graph.
        activations: values that a step has made and still needs at the peak, except communication.
        communication: results of collectives at the peak: gathered parameters, gradients in flight.
        reserved: memory of the process besides its tensors.
        at: place of the peak: a graph, and the node that is computed.
        host: maximum of what offloaded values take in the host's memory, which `peak` leaves out.
    """

    parameters: int
    optimizer: int
    buffers: int
    gradients: int
    activations: int
    communication: int
    reserved: int
    at: str
    host: int = 0

    @property
    def peak(self) -> int:
        """Total memory."""
        return self.tensors + self.reserved

    @property
    def tensors(self) -> int:
        """Memory of all tensors."""
        return (
            self.parameters
            + self.optimizer
            + self.buffers
            + self.gradients
            + self.activations
            + self.communication
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one update on the slowest rank, in seconds.

    Attributes:
        compute: kernels, except the optimizer's.
        exposed: waiting for collectives and messages that do not overlap with compute.
        bubble: waiting for other stages of the pipeline.
        update: the optimizer.
        flops: operations of matrix products of one rank.
    """

    compute: float
    exposed: float
    bubble: float
    update: float
    flops: float

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.compute + self.exposed + self.bubble + self.update


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a plan; for a pipeline, the memory of the rank that needs most, and the time of the
    slowest.
    """

    memory: Memory
    time: StepTime
    timelines: Mapping[str, Timeline] = field(repr=False)

    def tokens_per_second(self, tokens: int) -> float:
        """Return the throughput, given the number of tokens of one update."""
        return tokens / self.time.seconds


def costs(
    package: Package,
    plan: Plan,
    ranks: Sequence[RankGraphs],
    device: DeviceProfile,
    *,
    compiled: bool = True,
) -> Costs:
    """Estimate the costs of a plan.

    Args:
        package: the package.
        plan: the plan.
        ranks: graphs of each pipeline rank, in order; of one rank if there is no pipeline.
        device: device of each rank.
        compiled: True if graphs are compiled.
    """
    spans = spans_of(plan)
    rank_costs = [
        RankCosts(package, plan, graphs, device, spans, index, compiled=compiled)
        for index, graphs in enumerate(ranks)
    ]
    memory = max((rank.memory() for rank in rank_costs), key=lambda each: each.peak)
    lines = {
        f"{index}/{name}" if len(rank_costs) > 1 else name: line
        for index, rank in enumerate(rank_costs)
        for name, line in rank.lines.items()
    }
    time = (
        rank_costs[0].time()
        if plan.pipeline is None
        else _pipeline_time(plan, rank_costs, device, spans[PIPELINE])
    )
    return Costs(memory, time, lines)


def spans_of(plan: Plan) -> dict[str, Span]:
    """Return name of a process group -> its span on the cluster."""
    return {
        name: span_of(groups, plan.cluster.devices_per_node)
        for name, groups in plan.groups().items()
    }


class RankCosts:
    """Costs of one rank of the pipeline, or of any rank without one.

    Args:
        package: the package.
        plan: the plan.
        graphs: graphs of the rank.
        device: device of the rank; None to leave out times.
        spans: result of `spans_of`.
        index: place of the rank in the pipeline.
        compiled: True if graphs are compiled.

    Attributes:
        main: name of the main training graph.
        graphs: graphs of the rank.
        sizes: name of a training graph -> the value of each symbol of its sizes.
        held: name of a training graph or update -> its memory.
        lines: name of a training graph or update -> its timeline.
    """

    def __init__(
        self,
        package: Package,
        plan: Plan,
        graphs: RankGraphs,
        device: DeviceProfile | None,
        spans: Mapping[str, Span],
        index: int,
        *,
        compiled: bool,
    ) -> None:
        self._package, self._plan, self._device, self._index = package, plan, device, index
        self.graphs = graphs
        self.main = package.manifest.training_graphs()[0]
        trained = {name: graph for name, graph in graphs.ranks.items() if self._trains(name)}
        self.sizes = {name: self._sizes(graph) for name, graph in trained.items()}
        modules = {name: graph.module for name, graph in trained.items()}
        modules |= {update_name(owner): module for owner, module in graphs.updates.items()}
        self.held = {name: held(each, self.sizes.get(name, {})) for name, each in modules.items()}
        self.lines: dict[str, Timeline] = {}
        if device is not None:
            self.lines = {
                name: timeline(each, device, spans, self.sizes.get(name, {}), compiled=compiled)
                for name, each in modules.items()
            }

    def _trains(self, name: str) -> bool:
        training = self._package.manifest.training_graphs()
        return any(name.startswith(f"{graph}.") for graph in training)

    def _sizes(self, graph: RankGraph) -> dict[str, int]:
        rows = self._plan.rows_per_call
        if self._plan.pipeline is None:
            return sizes_of(graph.module, graph.inputs, rows)
        stages = self.graphs.cuts[self.main]
        return {
            name: rows if at == 0 else stages.example[name]
            for name, (_, at) in stages.symbols.items()
        }

    def name_of(self, action: Action) -> str | None:
        """Return the name of an action's graph, or None if the action does nothing."""
        name = stage_name(self.main, action.stage, action.part)
        return name if name in self.held else None

    def message_bytes(self, message: Message) -> int:
        """Return the bytes of a message between stages."""
        stages, rows = self.graphs.cuts[self.main], self._plan.rows_per_call
        symbols = {
            name: rows if at == 0 else stages.example[name]
            for name, (_, at) in stages.symbols.items()
        }
        return bytes_sent((stages.up if message.up else stages.down)[message.boundary], symbols)

    @property
    def update(self) -> Timeline:
        """Timeline of the update that follows the main graph."""
        return self.lines[update_name(update_owners(self._package)[self.main])]

    # Time

    def time(self) -> StepTime:
        """Return the time of a step without a pipeline: all training graphs in turn."""
        plan, lines = self._plan, []
        for graph in self._package.manifest.training_graphs():
            if plan.accumulate == 1:
                lines.append(self.lines[train_name(graph, Phase.ONLY)])
            else:
                lines += [self.lines[train_name(graph, Phase.ACCUMULATE)]] * (plan.accumulate - 1)
                lines.append(self.lines[train_name(graph, Phase.SYNCHRONISE)])
        owners = update_owners(self._package)
        updates = [
            self.lines[update_name(owners[graph])]
            for graph in self._package.manifest.training_graphs()
        ]
        exposed = sum(line.exposed for line in lines)
        return StepTime(
            compute=sum(line.seconds for line in lines) - exposed,
            exposed=exposed,
            bubble=0.0,
            update=sum(line.seconds for line in updates),
            flops=sum(line.flops for line in lines),
        )

    # Memory

    def memory(self) -> Memory:
        """Return the memory at the peak of an update."""
        plan, package = self._plan, self._package
        static = of_rank(plan, package, self._index)
        peaks = [
            self._train_peak(graph, static.gradient_bytes)
            for graph in package.manifest.training_graphs()
        ]
        peaks += [
            (f"{update_name(owner)}", self.held[update_name(owner)], static.gradient_bytes)
            for owner in self.graphs.updates
        ]
        where, at, gradients = max(peaks, key=lambda peak: peak[1].peak + peak[2])
        return Memory(
            parameters=static.parameter_bytes,
            optimizer=static.optimizer_bytes,
            buffers=self.buffers,
            gradients=gradients,
            activations=at.peak - at.communication,
            communication=at.communication,
            reserved=self.reserved,
            at=f"{where}: {at.at}",
            host=max(graph.host for graph in self.held.values()),
        )

    def _train_peak(self, graph: str, gradients: int) -> tuple[str, GraphMemory, int]:
        if self._plan.pipeline is not None:
            return "pipeline", self._pipeline_peak(), gradients
        names = [train_name(graph, phase) for phase in phases(self._plan)]
        name = max(names, key=lambda each: self.held[each].peak)
        return name, self.held[name], gradients if self._plan.accumulate > 1 else 0

    def _pipeline_peak(self) -> GraphMemory:
        """Return the greatest memory of the rank's actions, with what is kept between them."""
        most = GraphMemory(0, 0, 0, "")
        for action, name, others in self.kept_between():
            here = self.held[name]
            if here.peak + others > most.peak:
                most = GraphMemory(
                    here.peak + others, 0, here.communication, f"{action}, {here.at}"
                )
        return most

    def kept_between(self) -> Iterator[tuple[Action, str, int]]:
        """Yield the rank's actions that have a graph, in order: the action, the graph's name, and
        the bytes that are kept of microbatches in flight while it runs.
        """
        pipeline = self._plan.pipeline
        assert pipeline is not None
        live_bytes: dict[tuple[int, int], int] = {}
        for instruction in instructions(
            pipeline.order, pipeline.stage_ranks, self._plan.accumulate
        )[self._index]:
            if isinstance(instruction, Message):
                if instruction.target == self._index:
                    key = (instruction.boundary + int(instruction.up), instruction.microbatch)
                    live_bytes[key] = live_bytes.get(key, 0) + self.message_bytes(instruction)
                continue
            key = (instruction.stage, instruction.microbatch)
            name = self.name_of(instruction)
            if name is not None:
                yield instruction, name, sum(live_bytes.values())
                live_bytes[key] = live_bytes.get(key, 0) + self.held[name].left
            if instruction.part in (Part.BACKWARD, Part.WEIGHT):
                live_bytes.pop(key, None)

    @property
    def reserved(self) -> int:
        """Bytes of the process besides its tensors."""
        return 0 if self._device is None else self._device.reserved_bytes

    @property
    def buffers(self) -> int:
        """Bytes of the model's buffers and of the rows of one update."""
        manifest, plan = self._package.manifest, self._plan
        own = sum(_bytes(buffer.shape, buffer.dtype) for buffer in manifest.buffers)
        inputs = manifest.data_inputs().values()
        row = sum(
            _bytes([size for size in entry.shape[1:] if isinstance(size, int)], entry.dtype)
            for entry in inputs
        )
        return own + row * plan.rows_per_call * plan.accumulate


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a pipeline and its time.

    Attributes:
        action: the action.
        graph: name of its graph; None if it does nothing.
        start: time at which it begins, in seconds after the first action of all ranks.
        seconds: its duration.
    """

    action: Action
    graph: str | None
    start: float
    seconds: float


def pipeline_actions(
    plan: Plan, ranks: Sequence[RankCosts], device: DeviceProfile, span: Span
) -> list[list[TimedAction]]:
    """Simulate the actions of all ranks of a pipeline.

    Args:
        plan: a plan with a pipeline.
        ranks: costs of its pipeline ranks, in order.
        device: device of each rank.
        span: span of the group of a pipeline.

    Returns:
        The actions of each rank, in order.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    homes = pipeline.stage_ranks
    rows = [[Action.parse(text) for text in row] for row in pipeline.order]
    ready: dict[tuple[int, Part, int], float] = {}
    """Time at which the input of an action from another stage is available."""
    clock = [0.0] * len(rows)
    timed: list[list[TimedAction]] = [[] for _ in rows]
    while any(len(timed[rank]) < len(row) for rank, row in enumerate(rows)):
        for rank, row in enumerate(rows):
            while len(timed[rank]) < len(row) and _key(row[len(timed[rank])], len(homes)) in (
                None,
                *ready,
            ):
                action = row[len(timed[rank])]
                name = ranks[rank].name_of(action)
                seconds = ranks[rank].lines[name].seconds if name is not None else 0.0
                start = max(
                    clock[rank], ready.get(_key(action, len(homes)) or (-1, Part.FORWARD, -1), 0.0)
                )
                timed[rank].append(TimedAction(action, name, start, seconds))
                clock[rank] = start + seconds
                message = message_of(action, homes)
                if message is not None:
                    sent = (
                        0.0
                        if message.source == message.target
                        else seconds_of("send", ranks[rank].message_bytes(message), span, device)
                    )
                    kind = Part.FORWARD if message.up else Part.BACKWARD
                    ready[message.boundary + int(message.up), kind, message.microbatch] = (
                        clock[rank] + sent
                    )
    return timed


def _pipeline_time(
    plan: Plan, ranks: Sequence[RankCosts], device: DeviceProfile, span: Span
) -> StepTime:
    """Return the time of a step of a pipeline."""
    timed = pipeline_actions(plan, ranks, device, span)
    total = max(row[-1].start + row[-1].seconds for row in timed)
    busy = [sum(each.seconds for each in row) for row in timed]
    slowest = max(range(len(busy)), key=lambda rank: busy[rank])
    lines = [
        [rank.lines[each.graph] for each in row if each.graph is not None]
        for rank, row in zip(ranks, timed, strict=True)
    ]
    exposed = sum(line.exposed for line in lines[slowest])
    return StepTime(
        compute=busy[slowest] - exposed,
        exposed=exposed,
        bubble=total - busy[slowest],
        update=max(rank.update.seconds for rank in ranks),
        flops=max(sum(line.flops for line in row) for row in lines),
    )


def _key(action: Action, count: int) -> tuple[int, Part, int] | None:
    """Return the input from another stage that an action waits for, or None."""
    if action.part is Part.WEIGHT or (action.part is Part.FORWARD and action.stage == 0):
        return None
    if action.part is not Part.FORWARD and action.stage == count - 1:
        return None
    return (
        action.stage,
        Part.FORWARD if action.part is Part.FORWARD else Part.BACKWARD,
        action.microbatch,
    )


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return int(torch.Size(shape).numel()) * item_bytes(dtype)


def sizes_of(module: GraphModule, inputs: Sequence[Port], rows: int) -> dict[str, int]:
    """Return the value of each symbol of a graph in a call of this number of rows; other sizes of
    the batch are the example's.
    """
    placeholders, _ = ends(module)
    symbols: dict[str, int] = {}
    for node, port in zip(placeholders, inputs, strict=True):
        if port.role is Role.BATCH:
            for at, size in enumerate(node.meta["val"].shape):
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    symbols[str(size.node.expr)] = rows if at == 0 else int(size.node.hint)
    return symbols
