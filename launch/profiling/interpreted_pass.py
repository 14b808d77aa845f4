"""Interpret the graphs of a turn, and measure the time and memory of their operators by the user's
module and line.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from trainload.capture.operators import is_collective, is_overload
from trainload.launching.debugging.node_origins import backward_begins, line_of, module_of
from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.launching.profiling.live_tensors import LiveTensors, Origin
from trainload.launching.profiling.profile_result import (
    CollectiveTime,
    InterpretedProfile,
    Kind,
    LineTime,
    MemoryUse,
    ModuleMemory,
)
from trainload.launching.profiling.tensor_kinds import Leaves, origins_of
from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Estimate, Plan
from trainload.sharding.rewriting.rewrite import update_length

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ITEM_BYTES = (4, 2, 8, 1)
"""Bytes of an element of optimizer state, which may have another dtype than the parameters."""
State = Mapping[Origin, Sequence[Tensor]]
"""Tensors that a rank holds between steps."""


class _Place(NamedTuple):
    """A line of the user's code, or a collective, for which the time of a node counts."""

    module: str
    line: str
    is_backward: bool
    collective: str = ""
    is_wait: bool = False


@dataclass(frozen=True, slots=True)
class _GraphNotes:
    """Places of a graph's nodes, and origins of their values."""

    places: Mapping[Node, _Place]
    origins: Mapping[Node, Leaves]


class _Clock:
    """Times of the operators of one pass, in order: of this thread, or of the GPU's stream."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._times: list[tuple[_Place, Any, Any]] = []

    def now(self) -> Any:
        """Return the time: in seconds, or an event of the GPU."""
        return _recorded_event() if self._is_gpu else time.perf_counter()

    def took(self, place: _Place, began: Any, ended: Any) -> None:
        """Take the time of an operator."""
        self._times.append((place, began, ended))

    def times(self) -> list[tuple[_Place, float]]:
        """Return the seconds of each operator. The GPU must have finished."""
        if self._is_gpu:
            return [(place, began.elapsed_time(end) / 1e3) for place, began, end in self._times]
        return [(place, ended - began) for place, began, ended in self._times]


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
    event.record()
    return event


class InterpretedPass:
    """Measurement of the graphs of a turn.

    A turn is computed several times, and `begin` is called before each. The first time warms up and
    finds the peak of the memory. An operator's time is the least of all, since other threads of the
    process delay single operators by milliseconds.

    Args:
        plan: plan of the graphs.
        rank: this rank.
        device: its device.
        state: what the rank holds between steps.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device, state: State) -> None:
        self._plan, self._rank, self._device, self._state = plan, rank, device, state
        self._notes: dict[GraphModule, _GraphNotes] = {}
        self._clocks: list[_Clock] = []
        self.live = LiveTensors(device)
        self._at = ""

    def measured(self, built: Built) -> Built:
        """Return an interpreted build whose calls are measured.

        Its graphs must have the captured operators' stack traces (`uncompiled_build`).
        """
        updates = set(built.update_names.values())
        return built.replaced(
            lambda graph: graph.call if graph.name in updates else self._measure(graph)
        )

    def begin(self) -> None:
        """Begin a pass."""
        self._clocks.append(_Clock(is_gpu=self._device.type == "cuda"))
        self.live = LiveTensors(self._device, self.live.peak_at or None)
        for origin, tensors in self._state.items():
            for tensor in tensors:
                self.live.see(tensor, origin)

    @property
    def clock(self) -> _Clock:
        """The clock of this pass."""
        return self._clocks[-1]

    def look(self, graph: BuiltGraph, node: Node, value: Any, origins: Leaves) -> None:
        """Take the value of a node."""
        had_snapshot = bool(self.live.snapshot)
        for leaf, origin in zip(_leaves(value), origins, strict=False):
            if isinstance(leaf, Tensor) and origin is not None:
                self.live.see(leaf, origin)
        if self.live.snapshot and not had_snapshot:
            self._at = f"{graph.name}, {line_of(node) or node.target}"

    def _measure(self, graph: BuiltGraph) -> Call:
        module = graph.call
        assert isinstance(module, GraphModule), "the build is interpreted"

        def call(*arguments: Tensor) -> Sequence[Tensor]:
            if module not in self._notes:
                self._notes[module] = self._note(module, graph)
            measured = _MeasuredCall(module, graph, self, self._notes[module])
            results: Sequence[Tensor] = measured.run(*arguments)
            return results

        return call

    def _note(self, module: GraphModule, graph: BuiltGraph) -> _GraphNotes:
        nodes = list(module.graph.nodes)
        begin = backward_begins(module, graph.inputs)
        places = {
            node: _place_of(node, is_backward=position >= begin)
            for position, node in enumerate(nodes)
            if node.op not in ("placeholder", "output")
        }
        return _GraphNotes(places, origins_of(module, graph, begin))

    def result(self, estimate: Estimate) -> InterpretedProfile:
        """Return what was measured.

        Args:
            estimate: the plan's estimate for this rank.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        lines: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        collectives: defaultdict[str, float] = defaultdict(float)
        calls: Counter[str] = Counter()
        for passes in zip(*(clock.times() for clock in self._clocks), strict=True):
            place, seconds = passes[0][0], min(seconds for _, seconds in passes)
            if place.collective:
                collectives[place.collective] += seconds
                calls[place.collective] += not place.is_wait
            else:
                lines[place.module, place.line][place.is_backward] += seconds
        times = [LineTime(*key, *both) for key, both in lines.items()]
        return InterpretedProfile(
            tuple(sorted(times, key=lambda each: -each.seconds)),
            tuple(
                CollectiveTime(name, calls[name], seconds)
                for name, seconds in sorted(collectives.items(), key=lambda each: -each[1])
            ),
            self._memory(estimate),
            self._modules(),
            self._at,
        )

    def _memory(self, estimate: Estimate) -> tuple[MemoryUse, ...]:
        peak: Counter[Kind] = Counter()
        for origin, size in self.live.snapshot:
            peak[origin.kind] += size
        estimates = {
            Kind.PARAMETERS: estimate.parameter_bytes,
            Kind.GRADIENTS: estimate.gradient_bytes,
            Kind.STATE: estimate.optimizer_bytes,
            Kind.GATHERED: estimate.gathered_bytes,
        }
        return tuple(
            MemoryUse(kind, peak[kind], self.live.most[kind], estimates.get(kind)) for kind in Kind
        )

    def _modules(self) -> tuple[ModuleMemory, ...]:
        sizes: defaultdict[str, Counter[Kind]] = defaultdict(Counter)
        for origin, size in self.live.snapshot:
            for module, part in self._shares(origin, size):
                sizes[module][origin.kind] += part
        modules = [ModuleMemory(module, dict(kinds)) for module, kinds in sizes.items()]
        return tuple(sorted(modules, key=lambda each: -each.bytes))

    def _shares(self, origin: Origin, size: int) -> Iterator[tuple[str, int]]:
        """Yield (module, bytes) of a storage: a whole bucket, or a rank's share of one, belongs to
        several modules.
        """
        item = None
        if origin.bucket:
            bucket = next(each for each in self._plan.buckets if each.name == origin.bucket)
            lengths = (bucket.length, update_length(self._plan, bucket))
            items = (getattr(torch, bucket.dtype).itemsize, *_ITEM_BYTES)
            item = next((n for n in items if size in (n * length for length in lengths)), None)
        if item is None:
            yield origin.module, size
            return
        rest = size
        for name, low, high in parameters_within(self._plan, self._rank, bucket, size // item):
            yield name.rpartition(".")[0], (high - low) * item
            rest -= (high - low) * item
        if rest:
            yield "", rest  # padding


class _MeasuredCall(Interpreter):
    def __init__(
        self, module: GraphModule, graph: BuiltGraph, owner: InterpretedPass, notes: _GraphNotes
    ) -> None:
        super().__init__(module)
        self._graph, self._owner, self._notes = graph, owner, notes

    def run_node(self, n: Node) -> Any:
        """Compute a node, measure how long that takes, and look at its value while its inputs
        exist.
        """
        place = self._notes.places.get(n)
        if place is None:
            value = super().run_node(n)
        else:
            clock = self._owner.clock
            began = clock.now()
            value = super().run_node(n)
            clock.took(place, began, clock.now())
        if n.op != "output":
            self._owner.look(self._graph, n, value, self._notes.origins[n])
        return value


def _place_of(node: Node, *, is_backward: bool) -> _Place:
    if not is_collective(node):
        return _Place(module_of(node), line_of(node), is_backward)
    source = node
    while source.target is _WAIT and isinstance(source.args[0], Node):
        source = source.args[0]
    target: Any = source.target
    name = target.overloadpacket.__name__ if is_overload(target) else str(target)
    return _Place("", "", is_backward, name, is_wait=node.target is _WAIT)


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)
