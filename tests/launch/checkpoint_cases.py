"""Plans and states for the checkpoint tests.

The value of every element is a function of its parameter, entry and position.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tests.shares import cut

from trainload.core.storage.places import Where
from trainload.launching.checkpoints.checkpoint_place import CheckpointPlace, place_of
from trainload.launching.checkpoints.index import DataPosition
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.checkpoints.retention import Retention
from trainload.launching.checkpoints.sharded_state import ShardedState, held
from trainload.launching.checkpoints.writer import CheckpointWriter
from trainload.sharding.plans.plan import NO_ESTIMATE, Bucket, Cluster, Pipeline, Plan, Shard, Slot
from trainload.sharding.plans.strategies import Strategy

PARAMETERS: dict[str, tuple[tuple[int, ...], str | None]] = {
    "a.weight": ((5, 7), "decay"),
    "b.weight": ((3, 11), "decay"),
    "a.bias": ((7,), "plain"),
    "b.bias": ((1,), "plain"),
    "frozen": ((4, 3), None),
    "c.weight": ((12, 4), "decay"),
}
ONE_EACH = tuple((name,) for name in PARAMETERS)
BY_GROUP = (("a.weight", "b.weight"), ("a.bias", "b.bias"), ("frozen",), ("c.weight",))
TURNED = (("b.weight", "a.weight"), ("b.bias", "a.bias"), ("frozen",), ("c.weight",))
DATA = DataPosition(fingerprint="f" * 64, seed=3, position=48)


def shard_of(checkpoint: Path, rank: int, world: int) -> Path:
    """Return the path of a rank's shard, which the index lists."""
    index = Checkpoint.open(checkpoint).index
    return next(
        checkpoint / file.name
        for file in index.files
        if file.name.endswith(f"rank-{rank:05}-of-{world:05}.safetensors")
    )


def make_plan(
    strategy: Strategy,
    world: int,
    layout: Sequence[Sequence[str]] = BY_GROUP,
    gap: int = 0,
    tensor: int = 1,
    shard: Shard | None = None,
    stages: Sequence[tuple[int, ...]] = (),
    stage_ranks: tuple[int, ...] = (0, 1),
) -> Plan:
    """Return a plan with a bucket for each entry of `layout`, padded to a multiple of `world`.

    Args:
        strategy: strategy of the plan.
        world: number of ranks.
        layout: names of the parameters in each bucket.
        gap: number of unused elements after each parameter.
        tensor: number of ranks on the tensor axis.
        shard: how the tensor axis divides c.weight; None: not at all.
        stages: pipeline stages that use each bucket; empty: no pipeline.
        stage_ranks: pipeline rank of each stage. The last stage updates the buffer `mean`.
    """
    shards = {} if shard is None else {"c.weight": shard}
    buckets = []
    for number, names in enumerate(layout):
        slots, offset = [], 0
        for name in names:
            shape = (
                PARAMETERS[name][0]
                if name not in shards
                else shards[name].share_shape(PARAMETERS[name][0], tensor)
            )
            length = int(torch.Size(shape).numel())
            slots.append(Slot(parameter=name, offset=offset, length=length, shape=shape))
            offset += length + gap
        group = PARAMETERS[names[0]][1]
        dtype = "bfloat16" if group is None else "float32"
        length = -(-offset // world) * world
        groups = () if group is None else (group,)
        divided = names[0] in shards
        used_by = stages[number] if stages else ()
        buckets.append(
            Bucket(
                name=f"bucket{number}",
                dtype=dtype,
                groups=groups,
                length=length,
                slots=tuple(slots),
                divided=divided,
                stages=used_by,
            )
        )
    pipeline = Pipeline(
        ranks=len(set(stage_ranks)),
        schedule="1f1b",
        stage_ranks=stage_ranks,
        order=((),) * len(set(stage_ranks)),
        buffers={"mean": len(stage_ranks) - 1},
    )
    return Plan(
        package="0" * 64,
        cluster=Cluster(devices_per_node=world),
        strategy=strategy,
        shard_ranks=world // 2 if strategy == "hybrid" else None,
        tensor_ranks=tensor,
        tensor_shards=shards,
        pipeline=pipeline if stages else None,
        global_batch=24 * world,
        buckets=tuple(buckets),
        estimate=NO_ESTIMATE,
    )


def value(name: str, entry: str, salt: int = 0) -> torch.Tensor:
    """Return the values of a parameter's entry, (length,)."""
    shape, group = PARAMETERS[name]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{entry}/{salt}".encode()))
    drawn = torch.randn(torch.Size(shape).numel(), generator=generator)
    return drawn.to(torch.bfloat16) if group is None else drawn


def make_state(plan: Plan, rank: int, salt: int = 0) -> ShardedState:
    """Return the state of a rank: AdamW's entries for trained buckets, and two buffers."""
    flats: dict[str, dict[str, torch.Tensor]] = {}
    buckets = plan.held_buckets(plan.pipeline_index(rank))
    for bucket in buckets:
        flats[bucket.name] = {}
        for entry in ("param",) if not bucket.groups else ("param", "exp_avg", "exp_avg_sq"):
            flat = torch.zeros(bucket.length, dtype=getattr(torch, bucket.dtype))
            for slot in bucket.slots:
                whole = value(slot.parameter, entry, salt)
                if slot.parameter in plan.tensor_shards:
                    shaped, shard = (
                        whole.reshape(PARAMETERS[slot.parameter][0]),
                        plan.tensor_shards[slot.parameter],
                    )
                    whole = cut(shaped, shard, plan.tensor_index(rank), plan.tensor_ranks).flatten()
                flat[slot.offset : slot.offset + slot.length] = whole
            start, stop = held(plan, bucket, entry, rank)
            flats[bucket.name][entry] = flat[start:stop].clone()
    scalars = {
        bucket.name: {"step": torch.tensor(7.0 + salt)} for bucket in buckets if bucket.groups
    }
    buffers = {
        "mean": torch.arange(6.0).reshape(2, 3) + salt,
        "seen": torch.tensor(2**40 + 1 + salt),
    }
    return ShardedState(flats, scalars, buffers)


def writers(
    run: Path | CheckpointPlace,
    plan: Plan,
    attempt: str = "t1",
    keep_last: int = 2,
    timeout: float = 20.0,
) -> list[CheckpointWriter]:
    """Return a writer for each rank, all in this process.

    `run`: folder of a run, or the place of its checkpoints.
    """
    world, place = range(plan.world_size), place_of(run) if isinstance(run, Path) else run
    return [
        CheckpointWriter(place, plan, rank, attempt, keep=Retention(keep_last), timeout=timeout)
        for rank in world
    ]


def save_in(
    place: CheckpointPlace,
    plan: Plan,
    step: int,
    salt: int = 0,
    attempt: str = "t1",
    keep_last: int = 2,
) -> Where:
    """Write a checkpoint with all ranks, wait for it and return where it is."""
    ranks = writers(place, plan, attempt, keep_last)
    for rank, writer in enumerate(ranks):
        state = make_state(plan, rank, salt)
        if plan.pipeline is not None and plan.pipeline_index(rank) != plan.pipeline.stage_ranks[-1]:
            # the stage of another rank updates it
            state = replace(state, buffers={**state.buffers, "mean": torch.zeros(2, 3)})
        writer.save(step, state, DATA, {"best": 1.5})
    for writer in ranks:
        writer.wait()
    return place.published()[step]


def save_all(
    run: Path, plan: Plan, step: int, salt: int = 0, attempt: str = "t1", keep_last: int = 2
) -> Path:
    """Write a checkpoint like `save_in`, in the folder of a run."""
    return Path(save_in(place_of(run), plan, step, salt, attempt, keep_last))
