"""Search for the best plan: the degrees of the axes, the strategy, the number of microbatches, and
recomputation.

There are two passes. The first estimates every combination from the undivided graph: compute and
memory of a call, storage and communication of the strategy. The second makes the best plans,
rewrites their graphs, and simulates these (`costs`); only the second pass decides.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from trainload.core.errors import PlanError
from trainload.core.garbage import garbage_collection_disabled
from trainload.sharding.analysis.liveness import held
from trainload.sharding.planner.check_plan import no_offload, rows_of_update
from trainload.sharding.planner.device import DeviceProfile, Span, seconds_of
from trainload.sharding.planner.make_plan import make_plan
from trainload.sharding.planner.plan_costs import Costs, costs, sizes_of
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.rank_timeline import timeline
from trainload.sharding.planner.simulate import simulate
from trainload.sharding.plans.buckets import item_bytes
from trainload.sharding.plans.estimate import state_counts
from trainload.sharding.plans.plan import TENSOR, Cluster, Plan
from trainload.sharding.plans.strategies import RECOMPUTES, Divide, Recompute, Schedule, Strategy
from trainload.sharding.rewriting.local_step import Local
from trainload.sharding.tensor.tensor_axis import TensorAxis

EXACT = 8
"""Default number of plans that are made and simulated."""
_AS_FAST = 1.02
"""Plans within this factor of the shortest time count as equally fast; the best of them is the one
that needs the least memory.
"""
_ROWS_APART = 8
"""The first pass computes calls of 1, 8, 64, ... rows and interpolates linearly between them."""
LOSS_CHUNKS = 8
"""Number of chunks of a loss that the planner tries, as in torchtitan's default."""
OFFLOADS = (0.125, 0.25, 0.5, 1.0)
"""Fractions of offload that the planner tries for plans that may not fit."""
_NEARLY_FULL = 0.8
"""Part of a device's memory from which on a plan may not fit: its estimate is not exact."""
_WORTH_CHUNKS = 0.95
"""Chunks are tried if they reduce the peak of a call at least to this part."""
_SCHEDULES: tuple[tuple[Schedule, int | None], ...] = (
    ("1f1b", None),
    ("1f1b", 2),
    ("zero-bubble", None),
    ("zbv", None),
)
_MAX_STAGES, _MAX_NODES = 16, 4096


@dataclass(frozen=True, slots=True)
class Choice:
    """Options of a plan. `schedule`: with its stages per rank; None without a pipeline."""

    strategy: Strategy
    tensor: int = 1
    pipeline: int = 1
    accumulate: int = 1
    recompute: Recompute = "job"
    schedule: tuple[Schedule, int | None] | None = None
    divide: Divide = "tensor"
    loss_chunks: int = 1
    offload: float = 0.0

    def __str__(self) -> str:
        parts: list[str] = [self.strategy]
        parts += [f"{self.divide} {self.tensor}"] if self.tensor > 1 else []
        if self.schedule is not None:
            name, stages = self.schedule
            parts += [f"pipeline {self.pipeline} ({name}{f'/{stages}' if stages else ''})"]
        parts += [f"loss in {self.loss_chunks} chunks"] if self.loss_chunks > 1 else []
        parts += [f"offload {self.offload:g}"] if self.offload else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options that the user has fixed; the planner chooses those that are None. `divide`: what a
    tensor axis divides, if there is one.
    """

    strategy: Strategy | None = None
    tensor: int | None = None
    pipeline: int | None = None
    accumulate: int | None = None
    recompute: Recompute | None = None
    schedule: tuple[Schedule, int | None] | None = None
    divide: Divide = "tensor"
    loss_chunks: int | None = None
    offload: float | None = None


_ANYTHING = Wanted()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was made and simulated."""

    choice: Choice
    plan: Plan
    costs: Costs


@dataclass(frozen=True, slots=True)
class Refused:
    """Options for which no plan was made, and the reason."""

    choice: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        candidates: those that fit first, ordered by time, except that the best one, if any fits, is
            first.
        judged: number of combinations that were estimated.
        refused: options for which no plan could be made.
        device: device of the search.
    """

    candidates: tuple[Candidate, ...]
    judged: int
    refused: tuple[Refused, ...]
    device: DeviceProfile

    def fits(self, candidate: Candidate) -> bool:
        """Return True if a candidate's memory fits into the device's."""
        return candidate.costs.memory.peak <= self.device.memory_bytes

    @property
    def best(self) -> Candidate | None:
        """The recommended candidate: of those that fit and are about as fast as the fastest, the
        one that needs the least memory.
        """
        return next((c for c in self.candidates if self.fits(c)), None)


@garbage_collection_disabled()  # `_judge_all` collects between axes
def search(
    source: Source,
    cluster: Cluster,
    device: DeviceProfile,
    wanted: Wanted = _ANYTHING,
    *,
    global_batch: int | None = None,
    exact: int = EXACT,
    options: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Find plans of a package for a cluster.

    Args:
        source: the package.
        cluster: its shape.
        device: profile of its devices.
        wanted: options that are fixed.
        global_batch: rows of one update; None for the recipe's.
        exact: number of plans that are made and simulated.
        options: further arguments of `make_plan`, for all plans.
        say: called with progress messages.

    Raises:
        PlanError: no plan can be made at all.
    """
    if wanted.offload and (wanted.pipeline or 1) > 1:
        raise no_offload(wanted.offload, wanted.pipeline or 1)
    rows = rows_of_update(source.package, global_batch)
    judged, refused = _judge_all(source, cluster, device, wanted, rows, options, say)
    if not judged:
        reasons = "; ".join(f"{each.choice}: {each.reason}" for each in refused)
        raise PlanError(
            "no plan can be made",
            where="plan",
            got=reasons or f"{rows} rows, which cannot be divided evenly among the devices",
        )
    candidates: list[Candidate] = []
    for choice in _in_trial_order(judged, device):
        say(
            f"{len(judged):,} plans estimated; simulating number {len(candidates) + 1} of the best"
            f" {exact}: {choice}"
        )
        try:
            candidates.append(evaluate(source, cluster, device, choice, rows, options))
        except PlanError as error:
            refused.append(Refused(str(choice), str(error)))
        fitting = sum(c.costs.memory.peak <= device.memory_bytes for c in candidates)
        if len(candidates) >= exact and (fitting or len(candidates) >= 2 * exact):
            break
    source.forget()
    return Found(in_order(candidates, device), len(judged), tuple(refused), device)


@garbage_collection_disabled()
def smallest(
    source: Source,
    cluster: Cluster,
    device: DeviceProfile,
    wanted: Wanted = _ANYTHING,
    *,
    global_batch: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Candidate | None:
    """Return the plan for the fewest nodes (doubling the nodes of `cluster`) on which the package
    fits; None if none is found.

    The arguments are those of `search`.
    """
    rows = rows_of_update(source.package, global_batch)
    while cluster.nodes * 2 <= _MAX_NODES:
        cluster = cluster.model_copy(update={"nodes": cluster.nodes * 2})
        judged, _ = _judge_all(source, cluster, device, wanted, rows, options, lambda _: None)
        for each in sorted(judged, key=lambda each: each.bytes)[:2]:
            try:
                candidate = evaluate(source, cluster, device, each.choice, rows, options)
            except PlanError:
                continue  # try the next one
            if candidate.costs.memory.peak <= device.memory_bytes:
                return candidate
    return None


def evaluate(
    source: Source,
    cluster: Cluster,
    device: DeviceProfile,
    choice: Choice,
    rows: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Candidate:
    """Make the plan of a choice and its graphs, and compute its costs. Raise PlanError if there is
    no such plan.
    """
    name, stages = choice.schedule or (None, None)
    plan = make_plan(
        source,
        cluster,
        choice.strategy,
        global_batch=rows,
        accumulate=choice.accumulate,
        tensor_ranks=choice.tensor,
        pipeline_ranks=choice.pipeline,
        schedule=name,
        stages_per_rank=stages,
        recompute=choice.recompute,
        divide=choice.divide,
        loss_chunks=choice.loss_chunks,
        offload=choice.offload,
        **options,
    )
    return Candidate(choice, plan, costs_of(source, plan, device))


def costs_of(source: Source, plan: Plan, device: DeviceProfile, *, compiled: bool = True) -> Costs:
    """Return the costs of a plan.

    Args:
        source: its package.
        plan: the plan.
        device: device of each rank.
        compiled: True if graphs are compiled.

    Raises:
        PlanError: the collectives of its ranks' graphs do not match.
    """
    return costs(
        source.package,
        plan,
        simulate(source, plan, training_only=True).ranks,
        device,
        compiled=compiled,
    )


def in_order(candidates: Sequence[Candidate], device: DeviceProfile) -> tuple[Candidate, ...]:
    """Sort candidates in the order of `Found.candidates`."""
    over = sorted(
        (c for c in candidates if c.costs.memory.peak > device.memory_bytes),
        key=lambda c: c.costs.memory.peak,
    )
    fitting = sorted(
        (c for c in candidates if c.costs.memory.peak <= device.memory_bytes),
        key=lambda c: c.costs.time.seconds,
    )
    if fitting:
        as_fast = [
            c for c in fitting if c.costs.time.seconds <= _AS_FAST * fitting[0].costs.time.seconds
        ]
        best = min(as_fast, key=lambda c: c.costs.memory.peak)
        fitting = [best, *(c for c in fitting if c is not best)]
    return (*fitting, *over)


# Combinations to choose from


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _tensor_degrees(cluster: Cluster, wanted: Wanted) -> list[int]:
    """Return the possible sizes of the tensor axis. It stays within a node, whose links are the
    fastest.
    """
    return [wanted.tensor] if wanted.tensor is not None else _divisors(cluster.devices_per_node)


def _choices(
    cluster: Cluster,
    wanted: Wanted,
    tensor: int,
    rows: int,
    loss_chunks: Sequence[int],
    offloads: Sequence[float],
) -> Iterator[Choice]:
    remaining_ranks = cluster.world_size // tensor
    pipelines = (
        [wanted.pipeline]
        if wanted.pipeline is not None
        else [p for p in _divisors(remaining_ranks) if p <= _MAX_STAGES]
    )
    recomputes = [wanted.recompute] if wanted.recompute is not None else list(RECOMPUTES)
    for pipeline, recompute, chunks, offload in product(
        pipelines, recomputes, loss_chunks, offloads
    ):
        if offload and pipeline > 1:
            continue
        if remaining_ranks % pipeline or rows % (remaining_ranks // pipeline):
            continue
        lanes = remaining_ranks // pipeline
        for strategy, schedule in product(
            _strategies(cluster, wanted, tensor, lanes), _schedules(wanted, pipeline)
        ):
            for accumulate in _microbatches(wanted, rows // lanes, pipeline, schedule):
                if strategy != "zero2" or accumulate > 1:
                    yield Choice(
                        strategy,
                        tensor,
                        pipeline,
                        accumulate,
                        recompute,
                        schedule,
                        wanted.divide if tensor > 1 else "tensor",
                        chunks,
                        offload,
                    )


def _strategies(cluster: Cluster, wanted: Wanted, tensor: int, lanes: int) -> list[Strategy]:
    strategies: list[Strategy] = ["single"] if lanes == 1 else ["zero0", "zero1", "zero2", "zero3"]
    near = cluster.devices_per_node // tensor
    if 1 < near < lanes and lanes % near == 0:
        strategies.append("hybrid")
    return [strategy for strategy in strategies if wanted.strategy in (None, strategy)]


def _schedules(wanted: Wanted, pipeline: int) -> list[tuple[Schedule, int | None] | None]:
    if pipeline == 1:
        return [None]
    return [wanted.schedule] if wanted.schedule is not None else list(_SCHEDULES)


def _microbatches(
    wanted: Wanted, rows: int, pipeline: int, schedule: tuple[Schedule, int | None] | None
) -> list[int]:
    if wanted.accumulate is not None:
        return [wanted.accumulate] if rows % wanted.accumulate == 0 else []
    if schedule is None:
        return [each for each in _divisors(rows) if math.log2(each).is_integer() or each == rows]
    return [
        each
        for each in _divisors(rows)
        if each >= pipeline and (each % pipeline == 0) and each <= 16 * pipeline
    ]


# The first pass


def _judge_all(
    source: Source,
    cluster: Cluster,
    device: DeviceProfile,
    wanted: Wanted,
    rows: int,
    options: Mapping[str, Any],
    say: Callable[[str], None],
) -> tuple[list[_Judged], list[Refused]]:
    judged: list[_Judged] = []
    refused: list[Refused] = []
    for tensor in _tensor_degrees(cluster, wanted):
        divide = wanted.divide if tensor > 1 else "tensor"
        say(
            "estimating plans without a tensor axis"
            if tensor == 1
            else f"estimating plans with {divide} {tensor}"
        )
        try:
            judge = _Judge(
                source,
                cluster,
                device,
                source.tensor(tensor, options.get("tensor_rules"), divide),
                divide,
                rows,
            )
        except PlanError as error:
            refused.append(Refused(f"{divide} {tensor}", str(error)))
            continue
        chunks = judge.loss_chunks() if wanted.loss_chunks is None else [wanted.loss_chunks]
        axes = cluster, wanted, tensor, rows, chunks
        own = {choice: judge.judge(choice) for choice in _choices(*axes, [wanted.offload or 0.0])}
        judged += own.values()
        if wanted.offload is None and device.host is not None:
            # offload makes no plan faster, so it is for those that may not fit
            judged += [
                judge.judge(choice)
                for choice in _choices(*axes, OFFLOADS)
                if own[replace(choice, offload=0.0)].bytes > _NEARLY_FULL * device.memory_bytes
            ]
        source.forget()
        gc.collect()
    return judged, refused


@dataclass(frozen=True, slots=True)
class _Judged:
    choice: Choice
    bytes: float
    seconds: float


class _Judge:
    """Estimator of the choices for one tensor axis, based on the graph of one of its ranks."""

    def __init__(
        self,
        source: Source,
        cluster: Cluster,
        device: DeviceProfile,
        axis: TensorAxis,
        divide: Divide,
        rows: int,
    ) -> None:
        tensor = axis.ranks
        self._cluster, self._device, self._rows, self._tensor = cluster, device, rows, tensor
        shards = tuple(sorted(axis.shards.items()))
        package = source.package
        self._source, self._main = source, package.manifest.training_graphs()[0]
        self._local = Local(tensor, shards, positions=divide != "tensor")
        self._calls: dict[tuple[Local, int], tuple[float, float]] = {}
        states = state_counts(package)
        self._parameter_bytes = self._state_bytes = 0.0
        for parameter in package.parameters:
            if parameter.alias_of is None:
                size = math.prod(axis.shape(parameter.name, parameter.shape)) * item_bytes(
                    parameter.dtype
                )
                groups = source.trained.get(parameter.name, ())
                self._parameter_bytes += size
                self._state_bytes += size * sum(states[group] for group in groups)

    def judge(self, choice: Choice) -> _Judged:
        """Return an estimate of a choice's memory and time."""
        device, cluster = self._device, self._cluster
        lanes = cluster.world_size // (choice.tensor * choice.pipeline)
        local = replace(
            self._local,
            recompute=choice.recompute,
            loss_chunks=choice.loss_chunks,
            offload=choice.offload,
        )
        seconds, activations = self._estimate_call(local, self._rows // (lanes * choice.accumulate))
        near = min(lanes, max(1, cluster.devices_per_node // choice.tensor))
        degree = near if choice.strategy == "hybrid" else lanes
        parameter_bytes, state_bytes = (
            self._parameter_bytes / choice.pipeline,
            self._state_bytes / choice.pipeline,
        )
        shares = {
            "zero1": (1, 1, degree),
            "zero2": (1, degree, degree),
            "zero3": (degree,) * 3,
            "hybrid": (degree,) * 3,
        }
        of_parameters, of_gradients, of_state = shares.get(choice.strategy, (1, 1, 1))
        flying = (
            1.0
            if choice.pipeline == 1
            else min(choice.accumulate, choice.pipeline) / choice.pipeline
        )
        memory = (
            parameter_bytes / of_parameters
            + parameter_bytes / of_gradients
            + state_bytes / of_state
            + activations * flying
            + device.reserved_bytes
        )
        times = choice.accumulate if of_parameters > 1 else 1
        sent = seconds_of("all_gather_into_tensor", parameter_bytes, Span(degree, near), device)
        exchange = sent * (3 * times if of_parameters > 1 else 2)
        work = seconds * choice.accumulate / choice.pipeline
        stages = (choice.schedule[1] if choice.schedule is not None else None) or 1
        bubble = work * (choice.pipeline - 1) / (choice.accumulate * stages)
        return _Judged(choice, memory, work + bubble + max(0.0, exchange - 0.8 * work))

    def loss_chunks(self) -> list[int]:
        """Return the numbers of chunks of the loss that are worth trying."""
        whole, chunked = (
            self._simulate_call(replace(self._local, loss_chunks=chunks), _ROWS_APART)[1]
            for chunks in (1, LOSS_CHUNKS)
        )
        return [1, LOSS_CHUNKS] if chunked <= _WORTH_CHUNKS * whole else [1]

    def _estimate_call(self, local: Local, rows: int) -> tuple[float, float]:
        """Return the seconds of a call of this number of rows, and its peak memory in bytes."""
        low = 1
        while low * _ROWS_APART <= rows:
            low *= _ROWS_APART
        less = self._simulate_call(local, low)
        if low == rows:
            return less
        more, share = (
            self._simulate_call(local, low * _ROWS_APART),
            (rows / low - 1) / (_ROWS_APART - 1),
        )
        return less[0] + share * (more[0] - less[0]), less[1] + share * (more[1] - less[1])

    def _simulate_call(self, local: Local, rows: int) -> tuple[float, float]:
        """Return the same figures, computed from the graph."""
        key = local, rows
        if key not in self._calls:
            step = self._source.local(local, [self._main])[self._main]
            sizes = sizes_of(step.module, step.inputs, rows)
            spans = {TENSOR: Span(self._tensor, self._tensor)}
            line = timeline(step.module, self._device, spans, sizes)
            self._calls[key] = line.seconds, held(step.module, sizes).peak
        return self._calls[key]


def _in_trial_order(judged: list[_Judged], device: DeviceProfile) -> Iterator[Choice]:
    """Yield choices worth a simulation, best first: those that seem to fit by time, then the others
    by memory.

    At first only two of each kind of plan are yielded, where plans of one kind differ only in
    microbatches, recomputation and offload.
    """
    fitting = sorted(
        (each for each in judged if each.bytes <= device.memory_bytes),
        key=lambda each: each.seconds,
    )
    others = sorted(
        (each for each in judged if each.bytes > device.memory_bytes), key=lambda each: each.bytes
    )
    seen: dict[Choice, int] = {}
    later: list[Choice] = []
    for each in fitting:
        kind = replace(each.choice, accumulate=1, recompute="job", offload=0.0)
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            yield each.choice
        else:
            later.append(each.choice)
    yield from later
    yield from (each.choice for each in others)
