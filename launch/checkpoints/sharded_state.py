"""The state of a run as one rank holds it, and which part of it is whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from trainload.core.errors import CheckpointError
from trainload.sharding.plans.plan import Bucket, Plan

PARAM = "param"
"""The entry of a bucket that holds its parameters."""
MEAN = "param.mean"
"""The entry that holds the running mean of its parameters, where there is one. All others are the optimizer's: "exp_avg", or with its group
before it ("actor-group0.exp_avg") where a bucket is in several."""


@dataclass(frozen=True, slots=True)
class ShardedState:
    """What one rank holds between two steps.

    Attributes:
        flats: bucket -> entry ("param", "exp_avg", ...) -> (n,) tensor; n is the bucket's length where the entry is replicated
            and length / shard degree where it is sharded (`is_sharded`). Every bucket that the rank holds (`Plan.held_buckets`) has its
            "param".
        scalars: bucket -> entry ("step") -> 0-dim tensor, the same on all ranks. A bucket may be left out.
        buffers: the model's buffers by name, of any shape, the same on all ranks; under a plan with a pipeline, those that one stage
            updates are right on its rank.
        stacks: bucket -> entry ("row_var") -> (slots, ...) tensor, the same on all ranks: what an update of whole parameters keeps in other
            shapes than theirs, one value for each slot. A bucket may be left out.

    Law: all ranks of a run, but for those of a pipeline, hold the same names and dtypes.
    """

    flats: Mapping[str, Mapping[str, torch.Tensor]]
    scalars: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stacks: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)


class StateKind(StrEnum):
    """In which part of a `ShardedState` an entry of an optimizer's state is."""

    FLAT = "flat"
    SCALAR = "scalar"
    STACK = "stack"


def state_kind(elementwise: bool, like_parameter: bool) -> StateKind:
    """Where an entry is, by the kind of its update, and by whether it has its parameter's shape."""
    if like_parameter:
        return StateKind.FLAT
    return StateKind.SCALAR if elementwise else StateKind.STACK


def is_sharded(plan: Plan, entry: str) -> bool:
    """Whether a rank holds only its share of an entry of a bucket."""
    return plan.shards_parameters if entry == PARAM else plan.shards_state


def share(length: int, index: int, parts: int) -> tuple[int, int]:
    """The elements [start, stop) of a bucket that make one of equal parts."""
    each = length // parts
    return index * each, (index + 1) * each


def held(plan: Plan, bucket: Bucket, entry: str, rank: int) -> tuple[int, int]:
    """The elements [start, stop) of an entry of a bucket that a rank holds."""
    return share(bucket.length, plan.shard_index(rank), plan.shard_degree) if is_sharded(plan, entry) else (0, bucket.length)


def written(plan: Plan, bucket: Bucket, rank: int) -> tuple[int, int]:
    """The elements [start, stop) of its bucket that a rank writes, if its rank of the pipeline is the first that holds it."""
    if bucket.divided:
        return share(bucket.length, plan.part_index(rank), plan.data_ranks)
    each = plan.data_ranks * plan.tensor_ranks
    return share(bucket.length, plan.file_index(rank) % each, each)


def writes(plan: Plan, bucket: Bucket, rank: int) -> bool:
    """Whether a rank writes a part of a bucket."""
    return plan.holders(bucket)[0] == plan.pipeline_index(rank)


def owned_slices(state: ShardedState, plan: Plan, rank: int) -> dict[tuple[str, str], torch.Tensor]:
    """(bucket, entry) -> the elements that `rank` writes (`written`): every element is written by one of the ranks that hold its bucket.

    Raises: CheckpointError where the state is not that of the plan.
    """
    buckets = plan.held_buckets(plan.pipeline_index(rank))
    names = {bucket.name for bucket in buckets}
    if set(state.flats) != names or not set(state.scalars) <= names or not set(state.stacks) <= names:
        raise CheckpointError(
            "the state does not hold the plan's buckets", expected=", ".join(sorted(names)), got=", ".join(sorted(state.flats))
        )
    owned: dict[tuple[str, str], torch.Tensor] = {}
    for bucket in buckets:
        start, stop = written(plan, bucket, rank)
        entries = state.flats[bucket.name]
        if PARAM not in entries:
            raise CheckpointError("a bucket has no parameters", where=bucket.name, expected=PARAM, got=", ".join(sorted(entries)))
        for entry, flat in entries.items():
            assert "/" not in entry, entry  # it is part of a shard's keys
            first, last = held(plan, bucket, entry, rank)
            if tuple(flat.shape) != (last - first,):
                raise CheckpointError(
                    "a flat tensor has the wrong shape",
                    where=f"bucket {bucket.name!r}, entry {entry!r}, {plan.strategy}",
                    expected=f"({last - first},)",
                    got=str(tuple(flat.shape)),
                )
            if writes(plan, bucket, rank):
                owned[bucket.name, entry] = flat[start - first : stop - first]
    return owned
