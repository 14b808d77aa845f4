"""Explains an allocation that failed: what the rank held, what its plan was estimated to need, and which plans need less."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainload.capture.errors import OutOfMemoryError, PlanError
from trainload.launch.rank_state import RankState
from trainload.launch.utilisation import used_bytes
from trainload.packaging.read import Package
from trainload.sharding.plan import Plan
from trainload.sharding.planner.costs import Memory
from trainload.sharding.planner.device import DeviceProfile, read
from trainload.sharding.planner.search import Candidate, Choice, costs_of, evaluate
from trainload.sharding.source import Source

_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
"""Words by which torch's allocators, numpy and the system say it."""
_LESS = 0.8
"""A plan is named where it needs at most this part of what failed."""
_GIB = 2**30
_FIGURES = {"cpu": "cpu-2-cores", "cuda": "h100"}
"""Device kind -> whose figures plans are ordered by; the memory of tensors does not depend on them."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in _WORDS)


def explain_memory(
    error: Exception, package: Package, plan: Plan, held: RankState, device: torch.device, rank: int, when: str
) -> OutOfMemoryError:
    """Return what a user should read in place of an error of an allocator.

    Args:
        error: the allocator's.
        package: what is trained.
        plan: how.
        held: what the rank holds between steps.
        device: of the rank.
        rank: its number.
        when: "step 3", "the evaluation after step 3".
    """
    kept = _Kept.of(held)
    used = used_bytes(device)
    said = next((line.strip() for line in str(error).splitlines() if any(word in line for word in _WORDS)), type(error).__name__)
    estimated, smaller = "", ""
    try:
        source, figures = Source(package), read(_FIGURES[device.type])
        costs = costs_of(source, plan, figures)
        estimated = f"; the plan was estimated to need {_spelled(costs.memory)} at its peak, in {costs.memory.at}"
        smaller = ". ".join(_advice(each, costs.memory) for each in _smaller(source, plan, figures, costs.memory))
    except (PlanError, MemoryError, RuntimeError):  # there may be no memory for that either
        smaller = ""
    return OutOfMemoryError(
        f"rank {rank} ran out of memory: {said.rstrip('.')}",
        where=when,
        got=f"{_gib(used)} held by the process, of which {kept}{estimated}",
        cure=smaller or "Use more microbatches (--set accumulate=N), --recompute full, or more ranks with --strategy zero3.",
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes that a rank holds between steps, by kind."""

    parameters: int
    optimizer: int
    buffers: int

    @classmethod
    def of(cls, held: RankState) -> _Kept:
        states = [value for values in held.states.values() for value in values]
        return cls(
            parameters=_bytes(held.params.values()),
            optimizer=_bytes([*states, *held.means.values()]),
            buffers=_bytes([*held.buffers.values(), *held.constants.values()]),
        )

    def __str__(self) -> str:
        return f"parameters {_gib(self.parameters)}, optimizer state {_gib(self.optimizer)}, buffers {_gib(self.buffers)}"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _smaller(source: Source, plan: Plan, figures: DeviceProfile, failed: Memory) -> list[Candidate]:
    """Plans for the same devices that need less memory: the fastest of them, and the one that needs least."""
    found: list[Candidate] = []
    for choice in _choices(plan):
        try:
            found.append(evaluate(source, plan.cluster, figures, choice, plan.global_batch))
        except PlanError:
            continue
    fitting = sorted((c for c in found if c.costs.memory.tensors <= _LESS * failed.tensors), key=lambda c: c.costs.time.seconds)
    least = min(fitting, key=lambda c: c.costs.memory.tensors, default=None)
    return [] if least is None else [fitting[0], least] if fitting[0] is not least else [least]


def _choices(plan: Plan) -> Iterator[Choice]:
    """The plan's own choice, with one thing changed after the other."""
    pipeline = plan.pipeline
    schedule = None if pipeline is None else (pipeline.schedule, len(pipeline.stage_ranks) // pipeline.ranks)
    own = Choice(plan.strategy, plan.tensor_ranks, plan.pipeline_ranks, plan.accumulate, plan.recompute, schedule, plan.divide)
    strategies = [own.strategy] if plan.data_ranks == 1 or own.strategy in ("zero3", "hybrid") else [own.strategy, "zero3"]
    rows = plan.rows_per_call
    counts = [own.accumulate * each for each in range(1, rows + 1) if rows % each == 0 and math.log2(each).is_integer()]
    for strategy in strategies:
        for recompute in dict.fromkeys((own.recompute, "full")):
            for count in counts:
                choice = replace(own, strategy=strategy, recompute=recompute, accumulate=count)
                if choice != own:
                    yield choice


def _advice(found: Candidate, failed: Memory) -> str:
    choice = found.choice
    options = [f"--strategy {choice.strategy}"]
    options += [f"--recompute {choice.recompute}"] if choice.recompute != "job" else []
    options += [f"--accumulate {choice.accumulate}"] if choice.accumulate > 1 else []
    needs = _gib(found.costs.memory.tensors)
    return f"A plan with {' '.join(options)} was estimated to need {needs} in place of {_gib(failed.tensors)}"


def _spelled(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "communication": memory.communication,
        "buffers and rows": memory.buffers,
    }
    return f"{_gib(memory.tensors)} ({', '.join(f'{name} {_gib(size)}' for name, size in parts.items() if size)})"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= 0.01 * _GIB else f"{size / 2**20:.1f} MiB"
