"""Explain a failed allocation: memory held by the rank, the plan's estimate, and plans that need
less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from trainload.core.errors import OutOfMemoryError, PlanError
from trainload.launching.node.utilisation import used_bytes
from trainload.launching.verification.allocation_errors import PHRASES
from trainload.launching.worker.rank_state import RankState
from trainload.packaging.package import Package
from trainload.sharding.planner.device import DeviceProfile, read
from trainload.sharding.planner.plan_costs import Memory
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import (
    LOSS_CHUNKS,
    Candidate,
    Choice,
    costs_of,
    evaluate,
)
from trainload.sharding.plans.plan import Plan

_SUGGESTED_FRACTION = 0.8
"""A plan is suggested if it needs at most this fraction of the memory of the failed plan."""
_GIB = 2**30
_PROFILES = {"cpu": "cpu-2-cores", "cuda": "h100"}
"""Device kind -> profile by which plans are ordered.

The memory of tensors does not depend on it.
"""


def explain_memory(
    error: Exception,
    package: Package,
    plan: Plan,
    state: RankState,
    device: torch.device,
    rank: int,
    when: str,
) -> OutOfMemoryError:
    """Return an error that explains an allocator's error to a user.

    Args:
        error: the allocator's error.
        package: package that is trained.
        plan: plan of the run.
        state: state of the rank between steps.
        device: device of the rank.
        rank: number of the rank.
        when: "step 3", "the evaluation after step 3".
    """
    in_use = used_bytes(device)
    message = next(
        (line.strip() for line in str(error).splitlines() if any(word in line for word in PHRASES)),
        type(error).__name__,
    )
    estimated, smaller = "", ""
    with suppress(PlanError, MemoryError, RuntimeError):  # the estimate may run out of memory, too
        source, figures = Source(package), read(_PROFILES[device.type])
        costs = costs_of(source, plan, figures)
        estimated = (
            f"; the plan was estimated to need {_describe_memory(costs.memory)} at its peak, in"
            f" {costs.memory.at}"
        )
        smaller = ". ".join(
            _describe_candidate(candidate, costs.memory)
            for candidate in _smaller_plans(source, plan, figures, costs.memory)
        )
    return OutOfMemoryError(
        f"rank {rank} ran out of memory: {message.rstrip('.')}",
        where=when,
        got=f"{_gib(in_use)} held by the process, of which {_describe_state(state)}{estimated}",
        hint=smaller
        or (
            "Use more microbatches (--set accumulate=N), --recompute full, or more ranks with"
            " --strategy zero3."
        ),
    )


def _describe_state(state: RankState) -> str:
    states = [value for values in state.states.values() for value in values]
    kinds = {
        "parameters": [*state.params.values()],
        "optimizer state": [*states, *state.means.values()],
        "buffers": [*state.buffers.values(), *state.constants.values()],
    }
    return _format(
        {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kinds.items()}
    )


def _smaller_plans(
    source: Source, plan: Plan, figures: DeviceProfile, failed: Memory
) -> list[Candidate]:
    """Return plans for the same devices that need less memory: the fastest, and the one that needs
    the least.
    """
    candidates: list[Candidate] = []
    for choice in _choices(plan):
        try:
            candidates.append(evaluate(source, plan.cluster, figures, choice, plan.global_batch))
        except PlanError:
            continue
    fitting = [
        candidate
        for candidate in candidates
        if candidate.costs.memory.tensors <= _SUGGESTED_FRACTION * failed.tensors
    ]
    if not fitting:
        return []
    fastest, least = (
        min(fitting, key=lambda c: c.costs.time.seconds),
        min(fitting, key=lambda c: c.costs.memory.tensors),
    )
    return [fastest] if fastest is least else [fastest, least]


def _choices(plan: Plan) -> Iterator[Choice]:
    """Yield variants of the plan's choice with other strategies, recomputation, chunks of the loss
    and numbers of microbatches.
    """
    pipeline = plan.pipeline
    schedule = (
        None
        if pipeline is None
        else (pipeline.schedule, len(pipeline.stage_ranks) // pipeline.ranks)
    )
    own = Choice(
        plan.strategy,
        plan.tensor_ranks,
        plan.pipeline_ranks,
        plan.accumulate,
        plan.recompute,
        schedule,
        plan.divide,
        plan.loss_chunks,
        plan.offload,
    )
    strategies = (
        [own.strategy]
        if plan.data_ranks == 1 or own.strategy in ("zero3", "hybrid")
        else [own.strategy, "zero3"]
    )
    rows = plan.rows_per_call
    counts = [
        own.accumulate * factor
        for factor in range(1, rows + 1)
        if rows % factor == 0 and math.log2(factor).is_integer()
    ]
    for strategy, recompute, chunks, count in itertools.product(
        strategies,
        dict.fromkeys((own.recompute, "full")),
        dict.fromkeys((own.loss_chunks, max(own.loss_chunks, LOSS_CHUNKS))),
        counts,
    ):
        choice = replace(
            own, strategy=strategy, recompute=recompute, accumulate=count, loss_chunks=chunks
        )
        if choice != own:
            yield choice


def _describe_candidate(candidate: Candidate, failed: Memory) -> str:
    choice = candidate.choice
    options = [f"--strategy {choice.strategy}"]
    options += [f"--recompute {choice.recompute}"] if choice.recompute != "job" else []
    options += [f"--loss-chunks {choice.loss_chunks}"] if choice.loss_chunks > 1 else []
    options += [f"--offload {choice.offload:g}"] if choice.offload else []
    options += [f"--accumulate {choice.accumulate}"] if choice.accumulate > 1 else []
    needs = _gib(candidate.costs.memory.tensors)
    return (
        f"A plan with {' '.join(options)} was estimated to need {needs} instead of"
        f" {_gib(failed.tensors)}"
    )


def _describe_memory(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "communication": memory.communication,
        "buffers and rows": memory.buffers,
    }
    return (
        f"{_gib(memory.tensors)} ({_format({name: size for name, size in parts.items() if size})})"
    )


def _format(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= 0.01 * _GIB else f"{size / 2**20:.1f} MiB"
