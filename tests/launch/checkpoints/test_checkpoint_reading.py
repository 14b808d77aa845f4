"""Checkpoints can be read by any number of ranks, and any corruption is detected."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tests.launch.checkpoint_cases import (
    BY_GROUP,
    DATA,
    ONE_EACH,
    PARAMETERS,
    TURNED,
    make_plan,
    make_state,
    save_all,
    shard_of,
    value,
    writers,
)
from tests.ranks import on_ranks

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import CheckpointError
from trainload.launching.checkpoints.checkpoint_files import CheckpointFiles
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.index import FileRecord
from trainload.launching.checkpoints.load import full_parameters, load_sharded
from trainload.launching.checkpoints.reader import Checkpoint, latest_checkpoint, usable_checkpoint
from trainload.launching.checkpoints.shard import ShardReader
from trainload.launching.checkpoints.sharded_state import ShardedState, held
from trainload.launching.checkpoints.writer import CheckpointWriter
from trainload.packaging.tensors import chunks
from trainload.sharding.plans.plan import Bucket, Plan, Shard, Slot
from trainload.sharding.plans.strategies import Strategy

PLANS = {
    "single": make_plan("single", 1),
    "zero0 of 2": make_plan("zero0", 2, ONE_EACH),
    "zero1 of 2": make_plan("zero1", 2, TURNED, gap=3),
    "zero3 of 2": make_plan("zero3", 2),
    "zero3 of 5": make_plan("zero3", 5, ONE_EACH, gap=1),
    "zero1 of 3": make_plan("zero1", 3, BY_GROUP),
    "zero2 of 2": make_plan("zero2", 2, ONE_EACH),
    "hybrid of 4": make_plan("hybrid", 4, TURNED),
    "hybrid of 6": make_plan("hybrid", 6, BY_GROUP, gap=2),
    "rows of 2": make_plan("single", 2, BY_GROUP, gap=1, tensor=2, shard=Shard(dim=0)),
    "blocks of 2, zero3 of 2": make_plan(
        "zero3", 4, TURNED, tensor=2, shard=Shard(dim=0, blocks=3)
    ),
    "columns of 4, zero1 of 2": make_plan("zero1", 8, BY_GROUP, tensor=4, shard=Shard(dim=1)),
    "two stages": make_plan("single", 2, BY_GROUP, stages=((0, 1), (0,), (1,), (1,))),
    "four stages in a V, zero1 of 2": make_plan(
        "zero1", 4, TURNED, gap=1, stages=((1, 2), (0,), (0, 3), (2,)), stage_ranks=(0, 1, 1, 0)
    ),
    "two stages, columns of 2, zero3 of 2": make_plan(
        "zero3", 8, BY_GROUP, tensor=2, shard=Shard(dim=1), stages=((0, 1), (1,), (0,), (1,))
    ),
    "columns of 2, zero0 of 3": make_plan(
        "zero0", 6, ONE_EACH, gap=2, tensor=2, shard=Shard(dim=1)
    ),
}


def assert_same(found: ShardedState, wanted: ShardedState) -> None:
    for kind in ("flats", "scalars"):
        for bucket in wanted.flats:
            left, right = (
                getattr(found, kind).get(bucket, {}),
                getattr(wanted, kind).get(bucket, {}),
            )
            assert set(left) == set(right)
            for entry in right:
                torch.testing.assert_close(left[entry], right[entry], rtol=0, atol=0)
    assert set(found.buffers) == set(wanted.buffers)
    for name, tensor in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], tensor, rtol=0, atol=0)


NUMBERS = {name: number for number, name in enumerate(PLANS)}


@pytest.mark.matrix(when=lambda written, read: (NUMBERS[written] + 3 * NUMBERS[read]) % 8 == 0)
@pytest.mark.parametrize(("written", "read"), list(itertools.product(PLANS, PLANS)))
def test_a_checkpoint_of_any_plan_is_read_under_any_other(
    tmp_path: Path, written: str, read: str
) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, PLANS[written], 3))
    for rank in range(PLANS[read].world_size):
        assert_same(load_sharded(checkpoint, PLANS[read], rank), make_state(PLANS[read], rank))


@pytest.mark.parametrize("name", PLANS)
def test_parameters_are_read_whole(tmp_path: Path, name: str) -> None:
    found = dict(full_parameters(Checkpoint.open(save_all(tmp_path, PLANS[name], 3))))
    assert set(found) == set(PARAMETERS)
    for parameter, tensor in found.items():
        torch.testing.assert_close(
            tensor, value(parameter, "param").reshape(PARAMETERS[parameter][0]), rtol=0, atol=0
        )


def test_every_interval_of_a_parameter_is_its_slice(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, PLANS["zero3 of 5"], 3))
    wanted = value("b.weight", "exp_avg")
    for start, stop in itertools.combinations_with_replacement(range(len(wanted) + 1), 2):
        assert torch.equal(
            checkpoint.parameter_interval("b.weight", "exp_avg", start, stop), wanted[start:stop]
        )


def test_only_the_files_that_an_interval_lies_in_are_read(tmp_path: Path) -> None:
    path = save_all(tmp_path, PLANS["zero3 of 5"], 3)
    for number in (0, 2, 3, 4):
        shard_of(path, number, 5).unlink()
    checkpoint = Checkpoint.open(path)
    assert torch.equal(
        checkpoint.parameter_interval("a.weight", "param", 8, 14), value("a.weight", "param")[8:14]
    )
    with pytest.raises(CheckpointError, match="rank-00002-of-00005"):
        checkpoint.parameter_interval("a.weight", "param", 8, 20)


def test_the_index_says_where_the_run_is(tmp_path: Path) -> None:
    index = Checkpoint.open(save_all(tmp_path, PLANS["zero3 of 2"], 120)).index
    assert (index.step, index.data, index.user, index.world_size, index.strategy) == (
        120,
        DATA,
        {"best": 1.5},
        2,
        "zero3",
    )


def test_shards_are_plain_safetensors_and_hold_each_element_once(tmp_path: Path) -> None:
    path = save_all(tmp_path, PLANS["zero0 of 2"], 3)
    assert sorted(file.name for file in path.rglob("*") if file.is_file()) == [
        "index.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]
    shards = [safetensors.torch.load_file(shard_of(path, rank, 2)) for rank in range(2)]
    both = torch.cat([shard["flat/param/bucket0"] for shard in shards])
    assert torch.equal(both, make_state(PLANS["zero0 of 2"], 0).flats["bucket0"]["param"])
    assert shards[0]["scalar/step/bucket0"].shape == ()
    assert not [key for key in shards[1] if not key.startswith("flat/")]


def test_zero_dim_state_comes_from_the_first_parameters_bucket(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, PLANS["zero0 of 2"], 3, salt=5))
    state = load_sharded(checkpoint, PLANS["single"], 0)
    assert state.scalars["bucket0"]["step"].item() == 12.0
    assert state.scalars["bucket0"]["step"].shape == ()
    assert "step" not in state.scalars["bucket2"]


def test_any_flipped_bit_of_any_file_is_noticed(tmp_path: Path) -> None:
    path = save_all(tmp_path, PLANS["zero3 of 2"], 3)
    rng = random.Random(0)
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        whole = file.read_bytes()
        places = range(len(whole) * 8) if file.name == "index.json" else range(0, len(whole) * 8, 7)
        for place in rng.sample(places, 250):
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises(CheckpointError) as caught:
                Checkpoint.open(path).verify()
            assert file.name in str(caught.value)
        file.write_bytes(whole)
    Checkpoint.open(path).verify()


@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "swapped"])
def test_a_damaged_shard_is_refused_when_it_is_read(tmp_path: Path, damage: str) -> None:
    path = save_all(tmp_path, PLANS["zero3 of 2"], 3)
    first, second = (shard_of(path, rank, 2) for rank in range(2))
    if damage == "swapped":
        shutil.copy(first, second)
    elif damage == "gone":
        second.unlink()
    else:
        second.write_bytes(
            second.read_bytes() + b"x" if damage == "longer" else second.read_bytes()[:-1]
        )
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002\.safetensors"):
        load_sharded(Checkpoint.open(path), PLANS["single"], 0)


def test_a_number_in_the_index_cannot_be_changed_by_hand(tmp_path: Path) -> None:
    index = save_all(tmp_path, PLANS["single"], 3) / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"step":3', b'"step":4'))
    with pytest.raises(CheckpointError, match=r"index\.json: the index has changed"):
        latest_checkpoint(place_of(tmp_path))


def test_an_index_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    index = save_all(tmp_path, PLANS["single"], 3) / "index.json"
    content = json.loads(index.read_bytes())["content"] | {"version": 4, "news": []}
    index.write_bytes(
        canonical_json({"content": content, "sha256": sha256_bytes(canonical_json(content))})
    )
    with pytest.raises(CheckpointError, match="expected version 2 or 3, got version 4"):
        Checkpoint.open(index.parent)


def test_a_checkpoint_of_before_chunks_is_refused_by_its_version(tmp_path: Path) -> None:
    index = save_all(tmp_path, PLANS["single"], 3) / "index.json"
    content = json.loads(index.read_bytes())["content"] | {"version": 1}
    index.write_bytes(
        canonical_json({"content": content, "sha256": sha256_bytes(canonical_json(content))})
    )
    with pytest.raises(CheckpointError, match="expected version 2 or 3, got version 1"):
        Checkpoint.open(index.parent)


def test_a_checkpoint_whose_shards_do_not_say_their_chunk_is_read(tmp_path: Path) -> None:
    """In format 2, the chunk size is 4 MiB in all shards."""
    index = save_all(tmp_path, PLANS["single"], 3) / "index.json"
    content = json.loads(index.read_bytes())["content"] | {"version": 2}
    for file in content["files"]:
        del file["chunk"]
    index.write_bytes(
        canonical_json({"content": content, "sha256": sha256_bytes(canonical_json(content))})
    )
    assert torch.equal(
        Checkpoint.open(index.parent).parameter_interval("c.weight", "param", 0, 48),
        value("c.weight", "param"),
    )


LENGTH = 2**16 * 15
CHUNK = 4096


def large(strategy: Strategy, world: int) -> Plan:
    """Return a plan with one parameter that is much larger than a chunk."""
    slot = Slot(parameter="w", offset=0, length=LENGTH, shape=(LENGTH,))
    bucket = Bucket(name="b", dtype="float32", groups=("g",), length=LENGTH, slots=(slot,))
    return make_plan(strategy, world).model_copy(update={"buckets": (bucket,)})


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (("zero3", 2), ("zero3", 5)),
        (("zero3", 5), ("hybrid", 4)),
        (("hybrid", 4), ("zero1", 3)),
        (("zero0", 2), ("zero3", 4)),
    ],
)
def test_a_rank_reads_what_it_holds_and_no_more_than_the_chunks_at_its_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: tuple[Strategy, int],
    read: tuple[Strategy, int],
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    plan = large(*written)
    ranks = writers(tmp_path, plan)
    for rank, writer in enumerate(ranks):
        shares = {entry: held(plan, plan.buckets[0], entry, rank) for entry in ("param", "exp_avg")}
        entries = {entry: torch.zeros(stop - start) for entry, (start, stop) in shares.items()}
        writer.save(3, ShardedState({"b": entries}), DATA, {})
    for writer in ranks:
        writer.wait()
    counted: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
        counted.append(preadv(descriptor, buffers, at))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", counting)
    for rank in range(read[1]):
        counted.clear()
        found = load_sharded(
            Checkpoint.open(tmp_path / "checkpoints" / "step-00000003"), large(*read), rank
        ).flats["b"]
        own = sum(value.nbytes for value in found.values())
        # at the ends of each part of each entry, and the headers
        ends = (written[1] + 1) * len(found) * 2 * CHUNK
        assert own <= sum(counted) <= own + ends < own + LENGTH


def test_a_checkpoint_of_many_shards_keeps_one_chunk(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, PLANS["zero3 of 5"], 3))
    load_sharded(checkpoint, PLANS["single"], 0)
    assert len(checkpoint._open) == 5
    assert len({id(shard._file._last) for shard in checkpoint._open.values()}) == 1


def test_the_latest_is_the_highest_step(tmp_path: Path) -> None:
    assert latest_checkpoint(place_of(tmp_path)) is None
    save_all(tmp_path, PLANS["single"], 9)
    newest = save_all(tmp_path, PLANS["single"], 100_000_000)
    (tmp_path / "checkpoints" / "step-00000200-copy").mkdir()
    assert latest_checkpoint(place_of(tmp_path)) == newest


@pytest.mark.parametrize("file", ["index.json", "shard"])
def test_a_corrupt_newest_gives_way_to_the_one_before_with_the_reason(
    tmp_path: Path, file: str
) -> None:
    older = save_all(tmp_path, PLANS["zero3 of 2"], 10)
    newer = save_all(tmp_path, PLANS["zero3 of 2"], 20)
    damaged = newer / file if file == "index.json" else shard_of(newer, 1, 2)
    damaged.write_bytes(b"\0" * 300)
    usable = usable_checkpoint(place_of(tmp_path))
    assert usable.path == older
    assert len(usable.rejected) == 1
    assert str(damaged) in usable.rejected[0]


def look_together(rank: int, world: int, folder: Path) -> None:
    read: list[str] = []
    opened = ShardReader.__init__

    def counted(
        shard: ShardReader, files: CheckpointFiles, record: FileRecord, *others: Any
    ) -> None:
        read.append(f"{files.where}/{record.name}")
        opened(shard, files, record, *others)

    ShardReader.__init__ = counted  # type: ignore[method-assign,assignment]
    usable = usable_checkpoint(place_of(folder), control=dist.group.WORLD)
    (folder / f"{rank}.json").write_text(json.dumps([str(usable.path), usable.rejected, read]))


def test_ranks_read_some_shards_each_and_find_the_same_checkpoint(tmp_path: Path) -> None:
    older = save_all(tmp_path, PLANS["zero3 of 5"], 10)
    newer = save_all(tmp_path, PLANS["zero3 of 5"], 20)
    damaged = shard_of(newer, 3, 5)
    damaged.write_bytes(b"\0" * 300)
    on_ranks(2, look_together, tmp_path)
    (path, rejected, first), (other, others, second) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert (path, rejected) == (other, others)
    assert path == str(older)
    assert len(rejected) == 1
    assert str(damaged) in rejected[0]
    of_the_older = [
        {Path(name).name for name in names if str(older) in name} for names in (first, second)
    ]
    assert of_the_older == [
        {f"rank-0000{number}-of-00005.safetensors" for number in numbers}
        for numbers in ((0, 2, 4), (1, 3))
    ]
    assert sum(str(newer) in name for name in (*first, *second)) == 5


def test_no_usable_checkpoint_is_none(tmp_path: Path) -> None:
    assert usable_checkpoint(place_of(tmp_path)).path is None
    (save_all(tmp_path, PLANS["single"], 3) / "index.json").write_bytes(b"")
    usable = usable_checkpoint(place_of(tmp_path))
    assert (usable.path, len(usable.rejected)) == (None, 1)
    (tmp_path / "checkpoints/step-00000003/index.json").unlink()  # no index, no checkpoint
    assert usable_checkpoint(place_of(tmp_path)).rejected == ()


def changed_plan(plan: Plan, **bucket: object) -> Plan:
    return plan.model_copy(
        update={"buckets": (plan.buckets[0].model_copy(update=bucket), *plan.buckets[1:])}
    )


def test_a_checkpoint_of_another_package_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, PLANS["single"], 3))
    with pytest.raises(CheckpointError, match="a different package"):
        load_sharded(checkpoint, PLANS["single"].model_copy(update={"package": "1" * 64}), 0)


def test_parameters_that_are_not_the_plans_are_refused(tmp_path: Path) -> None:
    plan = PLANS["single"]
    checkpoint = Checkpoint.open(save_all(tmp_path, plan, 3))
    with pytest.raises(CheckpointError, match=r"'a.weight'.*expected bfloat16"):
        load_sharded(checkpoint, changed_plan(plan, dtype="bfloat16"), 0)
    with pytest.raises(
        CheckpointError, match=r"'b.weight'.*expected no such parameter, got float32 \(3, 11\)"
    ):
        load_sharded(checkpoint, changed_plan(plan, slots=plan.buckets[0].slots[:1]), 0)


def test_states_with_other_entries_are_not_put_into_one_bucket(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, make_plan("zero0", 2, ONE_EACH), 3))
    plan = make_plan("single", 1)
    fewer = checkpoint.index.entries | {"bucket1": ("param",)}
    changed = Checkpoint(checkpoint.path, checkpoint.index.model_copy(update={"entries": fewer}))
    with pytest.raises(
        CheckpointError,
        match=r"one bucket have different optimizer states.*got exp_avg, exp_avg_sq, param; param",
    ):
        load_sharded(changed, plan, 0)


def test_zero_dim_states_that_differ_are_not_put_into_one_bucket(tmp_path: Path) -> None:
    plan = make_plan("single", 1, ONE_EACH)
    state = make_state(plan, 0)
    later = {**state.scalars, "bucket1": {"step": torch.tensor(8.0)}}
    writer = CheckpointWriter(place_of(tmp_path), plan, 0, "t1")
    writer.save(3, ShardedState(state.flats, later, state.buffers), DATA, {})
    writer.wait()
    with pytest.raises(CheckpointError, match=r"0-dim optimizer states.*'step': 7.0.*'step': 8.0"):
        load_sharded(
            Checkpoint.open(tmp_path / "checkpoints" / "step-00000003"), make_plan("single", 1), 0
        )


@pytest.mark.parametrize(
    ("entry", "start", "stop"),
    [("nothing", 0, 1), ("param", 0, 36), ("param", -1, 3), ("param", 4, 3)],
)
def test_an_interval_that_is_not_there_is_refused(
    tmp_path: Path, entry: str, start: int, stop: int
) -> None:
    checkpoint = Checkpoint.open(save_all(tmp_path, PLANS["single"], 3))
    with pytest.raises(CheckpointError, match="no such interval"):
        checkpoint.parameter_interval("a.weight", entry, start, stop)
