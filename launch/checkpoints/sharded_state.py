"""The state of a run on one rank, and the division of state among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from trainload.core.errors import CheckpointError
from trainload.sharding.plans.plan import Bucket, Plan

PARAM = "param"
"""Name of a bucket's entry with its parameters."""
MEAN = "param.mean"
"""Name of the entry with the running mean of the parameters, if there is one. All other entries are
optimizer state: "exp_avg", or with the group's name first ("actor-group0.exp_avg") if a bucket is
in several groups.
"""


@dataclass(frozen=True, slots=True)
class ShardedState:
    """State of one rank between two steps.

    Attributes:
        flats: bucket -> entry ("param", "exp_avg", ...) -> (n,) tensor; n is the bucket's length if
            the entry is replicated, and length / shard degree if it is sharded (`is_sharded`).
            Every bucket that the rank holds (`Plan.held_buckets`) has a "param" entry.
        scalars: bucket -> entry ("step") -> 0-dim tensor, the same on all ranks. A bucket may be
            missing.
        buffers: the model's buffers by name, of any shape, the same on all ranks. Under a plan with
            a pipeline, buffers that one stage updates are valid on its rank only.
        stacks: bucket -> entry ("row_var") -> (slots, ...) tensor, the same on all ranks: state of
            an update of whole parameters whose shapes differ from the parameters', one value for
            each slot. A bucket may be missing.

    Law: all ranks of a run, except those of a pipeline, hold the same names and dtypes.
    """

    flats: Mapping[str, Mapping[str, torch.Tensor]]
    scalars: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stacks: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)


class StateKind(StrEnum):
    """The part of a `ShardedState` that contains an entry of the optimizer state."""

    FLAT = "flat"
    SCALAR = "scalar"
    STACK = "stack"


def state_kind(elementwise: bool, like_parameter: bool) -> StateKind:
    """Return the kind of an entry, from the kind of its update and whether it has its parameter's
    shape.
    """
    if like_parameter:
        return StateKind.FLAT
    return StateKind.SCALAR if elementwise else StateKind.STACK


def is_sharded(plan: Plan, entry: str) -> bool:
    """Return True if a rank holds only its share of an entry of a bucket."""
    return plan.shards_parameters if entry == PARAM else plan.shards_state


def share(length: int, index: int, parts: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of one of `parts` equal parts."""
    part_length = length // parts
    return index * part_length, (index + 1) * part_length


def held(plan: Plan, bucket: Bucket, entry: str, rank: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of the elements of a bucket's entry that a rank holds."""
    return (
        share(bucket.length, plan.shard_index(rank), plan.shard_degree)
        if is_sharded(plan, entry)
        else (0, bucket.length)
    )


def written(plan: Plan, bucket: Bucket, rank: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of the elements of a bucket that a rank writes, if `writes`
    is True for it.
    """
    if bucket.divided:
        return share(bucket.length, plan.part_index(rank), plan.data_ranks)
    parts = plan.data_ranks * plan.tensor_ranks
    return share(bucket.length, plan.file_index(rank) % parts, parts)


def writes(plan: Plan, bucket: Bucket, rank: int) -> bool:
    """Return True if a rank writes a part of a bucket: its pipeline rank is the first that holds
    the bucket.
    """
    return plan.holders(bucket)[0] == plan.pipeline_index(rank)


def owned_slices(state: ShardedState, plan: Plan, rank: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return (bucket, entry) -> the elements that `rank` writes (`written`).

    Exactly one of the ranks that hold a bucket writes each of its elements.

    Raises:
        CheckpointError: the state does not fit the plan.
    """
    buckets = plan.held_buckets(plan.pipeline_index(rank))
    names = {bucket.name for bucket in buckets}
    if (
        set(state.flats) != names
        or not set(state.scalars) <= names
        or not set(state.stacks) <= names
    ):
        raise CheckpointError(
            "the state does not hold the plan's buckets",
            expected=", ".join(sorted(names)),
            got=", ".join(sorted(state.flats)),
        )
    owned: dict[tuple[str, str], torch.Tensor] = {}
    for bucket in buckets:
        start, stop = written(plan, bucket, rank)
        entries = state.flats[bucket.name]
        if PARAM not in entries:
            raise CheckpointError(
                "a bucket has no parameters",
                where=bucket.name,
                expected=PARAM,
                got=", ".join(sorted(entries)),
            )
        for entry, flat in entries.items():
            assert "/" not in entry, entry  # "/" is the separator in a shard's keys
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
