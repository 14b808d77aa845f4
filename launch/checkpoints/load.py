"""Load a rank's tensors from a checkpoint, under the plan that wrote it or any other plan for the
same package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from trainload.core.errors import CheckpointError
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.checkpoints.sharded_state import MEAN, PARAM, ShardedState, held
from trainload.packaging.tensors.safetensors_file import to_fill
from trainload.sharding.plans.plan import Bucket, Plan, Slot


def load_sharded(
    checkpoint: Checkpoint, plan: Plan, rank: int, *, state_alone: bool = False
) -> ShardedState:
    """Load the state of `rank` under `plan` into new CPU tensors; padding is zero. Only the rank's
    intervals are read.

    With `state_alone`, parameters and buffers are not loaded, and the checkpoint may be of a run of
    another package of the same program.

    Law: under the plan that wrote it, every element of a parameter is restored exactly.

    Raises:
        CheckpointError: the checkpoint is of another package, its parameters are not those of the
            plan, optimizer states for one bucket differ in their entries or 0-dim values, or a
            shard has changed.
    """
    if not state_alone and checkpoint.index.package != plan.package:
        raise CheckpointError(
            "the checkpoint belongs to a different package",
            where=str(checkpoint.path),
            expected=f"package {plan.package}",
            got=checkpoint.index.package,
            hint="Launch a new run, or resume with the package that the run started with.",
        )
    _check_parameters(checkpoint, plan)
    flats: dict[str, dict[str, torch.Tensor]] = {}
    scalars: dict[str, dict[str, torch.Tensor]] = {}
    stacks: dict[str, dict[str, torch.Tensor]] = {}
    for bucket in plan.held_buckets(plan.pipeline_index(rank)):
        entries = [
            entry
            for entry in _common_entries(checkpoint, bucket)
            if not (state_alone and entry == PARAM)
        ]
        flats[bucket.name] = {
            entry: _load_flat(checkpoint, plan, rank, bucket, entry) for entry in entries
        }
        scalars[bucket.name] = _load_scalars(checkpoint, bucket)
        stacks[bucket.name] = _load_stacks(checkpoint, bucket)
    return ShardedState(flats, scalars, {} if state_alone else checkpoint.buffers(), stacks)


def full_parameters(
    checkpoint: Checkpoint, *, mean: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of every parameter that is not an alias, with a whole CPU tensor of its shape
    and dtype.

    With `mean`, the tensor is the parameter's running mean, if there is one.

    Raises:
        CheckpointError: a shard has changed.
    """
    for bucket in checkpoint.index.buckets:
        for slot in bucket.slots:
            yield slot.parameter, whole_parameter(checkpoint, slot.parameter, mean=mean)


def whole_parameter(checkpoint: Checkpoint, name: str, *, mean: bool = False) -> torch.Tensor:
    """Return a parameter as `full_parameters` does.

    Raises:
        CheckpointError: there is no such parameter, or a shard has changed.
    """
    bucket, _ = checkpoint.bucket_of(name)
    entry = MEAN if mean and MEAN in checkpoint.index.entries[bucket.name] else PARAM
    shape = checkpoint.shape(name)
    return checkpoint.parameter_interval(name, entry, 0, math.prod(shape)).reshape(shape)


def _check_parameters(checkpoint: Checkpoint, plan: Plan) -> None:
    expected = {
        slot.parameter: (bucket.dtype, plan.shape(slot))
        for bucket in plan.buckets
        for slot in bucket.slots
    }
    actual = {
        s.parameter: (bucket.dtype, checkpoint.shape(s.parameter))
        for bucket in checkpoint.index.buckets
        for s in bucket.slots
    }
    for name in sorted(set(expected) | set(actual)):
        if expected.get(name) != actual.get(name):
            raise CheckpointError(
                f"parameter {name!r} differs between the checkpoint and the plan",
                where=str(checkpoint.path),
                expected=_describe_parameter(expected.get(name)),
                got=_describe_parameter(actual.get(name)),
            )


def _describe_parameter(parameter: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such parameter" if parameter is None else f"{parameter[0]} {parameter[1]}"


def _common_entries(checkpoint: Checkpoint, bucket: Bucket) -> tuple[str, ...]:
    entry_sets = {
        checkpoint.index.entries[checkpoint.bucket_of(slot.parameter)[0].name]
        for slot in bucket.slots
    }
    if len(entry_sets) > 1:
        raise CheckpointError(
            "parameters of one bucket have different optimizer states in the checkpoint",
            where=f"{checkpoint.path}, bucket {bucket.name!r}",
            expected="the same entries for all of them",
            got="; ".join(sorted(", ".join(entries) for entries in entry_sets)),
        )
    return entry_sets.pop() if entry_sets else (PARAM,)


def _load_scalars(checkpoint: Checkpoint, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return the bucket's 0-dim entries: those of its first parameter, to which those of the others
    must be equal.
    """
    sources = dict.fromkeys(checkpoint.bucket_of(slot.parameter)[0].name for slot in bucket.slots)
    scalars = [checkpoint.scalars(name) for name in sources]
    for other in scalars[1:]:
        if set(other) != set(scalars[0]) or not all(
            torch.equal(other[entry], scalars[0][entry]) for entry in other
        ):
            raise CheckpointError(
                "parameters of one bucket have different 0-dim optimizer states in the checkpoint",
                where=f"{checkpoint.path}, bucket {bucket.name!r}",
                expected=str({entry: value.item() for entry, value in scalars[0].items()}),
                got=str({entry: value.item() for entry, value in other.items()}),
            )
    return scalars[0] if scalars else {}


def _load_stacks(checkpoint: Checkpoint, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return the entries with their own shapes of the bucket's parameters, stacked."""
    states = [checkpoint.own(slot.parameter) for slot in bucket.slots]
    kinds = {
        tuple((entry, value.dtype, value.shape) for entry, value in sorted(own.items()))
        for own in states
    }
    if len(kinds) > 1:
        raise CheckpointError(
            "parameters of one bucket have different optimizer states in the checkpoint",
            where=f"{checkpoint.path}, bucket {bucket.name!r}",
            expected="the same entries for all of them",
            got="; ".join(sorted(str(kind) for kind in kinds)),
        )
    return {
        entry: torch.stack([own[entry] for own in states])
        for entry in (states[0] if states else ())
    }


def _load_flat(
    checkpoint: Checkpoint, plan: Plan, rank: int, bucket: Bucket, entry: str
) -> torch.Tensor:
    start, stop = held(plan, bucket, entry, rank)
    own = [
        (slot, max(start, slot.offset), min(stop, slot.offset + slot.length))
        for slot in bucket.slots
    ]
    own = [(slot, first, last) for slot, first, last in own if first < last]
    dtype: torch.dtype = getattr(torch, bucket.dtype)
    if bucket.slots:
        slot, first, _ = own[0] if own else (bucket.slots[0], bucket.slots[0].offset, 0)
        begin = 0 if slot.parameter in plan.tensor_shards else first - slot.offset
        dtype = checkpoint.dtype_of(slot.parameter, entry, begin)
    flat = to_fill((stop - start,), dtype)
    at = start
    for slot, first, last in own:
        flat[at - start : first - start].zero_()
        _fill(
            checkpoint,
            plan,
            rank,
            slot,
            entry,
            first - slot.offset,
            flat[first - start : last - start],
        )
        at = last
    flat[at - start :].zero_()
    return flat


def _fill(
    checkpoint: Checkpoint,
    plan: Plan,
    rank: int,
    slot: Slot,
    entry: str,
    start: int,
    into: torch.Tensor,
) -> None:
    shard = plan.tensor_shards.get(slot.parameter)
    if shard is None:
        checkpoint.fill_parameter(slot.parameter, entry, start, into)
    else:
        checkpoint.fill_share(
            slot.parameter, entry, shard, plan.tensor_ranks, plan.tensor_index(rank), start, into
        )
