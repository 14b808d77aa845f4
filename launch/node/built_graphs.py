"""Callables of a build, with their input and output ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from trainload.autograd_trace.compiling.cuda_graphs import Pool, Recorded
from trainload.autograd_trace.graphs import Port, Role
from trainload.launching.node.utilisation import Work
from trainload.sharding.analysis.collectives import Collective
from trainload.sharding.pipeline.stages import Part, Value
from trainload.sharding.rewriting.rewrite import BETWEEN, Phase

Call = Callable[..., Sequence[Tensor]]
_READ_AT_ONCE = (Role.BUCKET_GRADIENT,)
"""Roles of results that only the next call or update reads."""


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A callable over flat tensors, with its name within the build and its input and output ports,
    in order.
    """

    name: str
    call: Call
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Values that cross the boundaries of a graph's pipeline stages, as in `Stages`."""

    up: tuple[tuple[Value, ...], ...]
    down: tuple[tuple[Value, ...], ...]
    symbols: Mapping[str, tuple[str, int]]

    def at(self, boundary: int, *, up: bool) -> tuple[Value, ...]:
        """Return the values that cross a boundary in one direction."""
        return (self.up if up else self.down)[boundary]


@dataclass(frozen=True, slots=True)
class BuiltStages:
    """A pipeline rank's parts of a graph, by (stage, part).

    Parts that have nothing to do are left out.
    """

    parts: dict[tuple[int, Part], BuiltGraph]
    crossing: Crossing

    def forget(self, stage: int, done: Part, between: dict[str, Tensor]) -> None:
        """Delete those of a stage's values that nothing needs once a part of the stage is done."""
        later = {
            Part.FORWARD: (Part.BACKWARD, Part.INPUT, Part.WEIGHT),
            Part.INPUT: (Part.WEIGHT,),
        }[done]
        graphs = [self.parts[stage, part] for part in later if (stage, part) in self.parts]
        taken = {port.name for graph in graphs for port in graph.inputs if port.role in BETWEEN}
        sent = {value.name for value in (self.crossing.down[stage - 1] if stage else ())}
        for name in between.keys() - taken - sent:
            del between[name]


@dataclass(frozen=True, slots=True)
class Built:
    """All callables of a rank. Unless stated otherwise they are keyed by the name of the captured
    graph.

    Attributes:
        train: a training graph for each phase of a step.
        forward: graphs that compute evaluation totals over a batch, or outputs for other graphs.
        update: results of `UpdateStep.trace`, which write in place.
        update_names: names of the updates within the build.
        compiled: True if they were compiled.
        collectives: collectives of each graph, by the graph's name within the build.
        work: operations of the captured graphs, before they are divided among ranks.
        stages: replaces `train` and `forward` under a plan with a pipeline.
        failed: graphs that could not be compiled -> the compiler's error. Calling one raises.
        is_recorded: True if training graphs are recorded as CUDA graphs.
    """

    train: dict[str, dict[Phase, BuiltGraph]]
    forward: dict[str, BuiltGraph]
    update: dict[str, Call]
    update_names: dict[str, str]
    compiled: bool
    collectives: dict[str, tuple[Collective, ...]]
    work: Work
    stages: dict[str, BuiltStages] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    is_recorded: bool = False

    def names(self) -> set[str]:
        """Return the names of all graphs and updates, within the build."""
        graphs = [graph for by_phase in self.train.values() for graph in by_phase.values()] + list(
            self.forward.values()
        )
        graphs += [part for stages in self.stages.values() for part in stages.parts.values()]
        return {graph.name for graph in graphs} | set(self.update_names.values())

    def recorded(self) -> Built:
        """Return a copy whose training graphs are recorded as CUDA graphs.

        Evaluations and updates are not: the former are rare, the latter a kernel for each bucket.
        """
        pool = Pool()
        training = {graph.name for phases in self.train.values() for graph in phases.values()}

        def record(graph: BuiltGraph) -> Call:
            if graph.name not in training:
                return graph.call
            at_once = [port.role in _READ_AT_ONCE for port in graph.outputs]
            return Recorded(graph.name, graph.call, at_once, pool)

        return replace(self.replaced(record), is_recorded=True)

    def replaced(self, chosen: Callable[[BuiltGraph], Call]) -> Built:
        """Return a copy in which `chosen` has replaced each callable.

        It receives updates without inputs and outputs.
        """

        def graph(built_graph: BuiltGraph) -> BuiltGraph:
            return replace(built_graph, call=chosen(built_graph))

        updates = {self.update_names[name]: call for name, call in self.update.items()}
        replaced = {name: chosen(BuiltGraph(name, call, (), ())) for name, call in updates.items()}
        return replace(
            self,
            train={
                name: {phase: graph(each) for phase, each in by_phase.items()}
                for name, by_phase in self.train.items()
            },
            forward={name: graph(each) for name, each in self.forward.items()},
            update={name: replaced[self.update_names[name]] for name in self.update},
            stages={
                name: replace(each, parts={key: graph(part) for key, part in each.parts.items()})
                for name, each in self.stages.items()
            },
        )
