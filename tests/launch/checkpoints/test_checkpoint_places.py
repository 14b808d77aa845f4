"""Checkpoints behave alike in every kind of storage; its failures are handled and reported."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from tests.launch import killed_uploader
from tests.launch.checkpoint_cases import (
    BY_GROUP,
    DATA,
    ONE_EACH,
    TURNED,
    make_plan,
    make_state,
    save_in,
    writers,
)
from tests.launch.checkpoint_places import Kept, wire_to
from tests.launch.checkpoints.test_checkpoint_reading import assert_same, large
from tests.packaging.places import BUCKET
from tests.ranks import ran
from tests.waiting import wait_until

from trainload.core.errors import CheckpointError, StorageError
from trainload.core.storage import bounded_files
from trainload.core.storage import remote_files as remote_files
from trainload.core.storage.remote_files import RemoteFiles
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import full_parameters, load_sharded
from trainload.launching.checkpoints.reader import Checkpoint, latest_checkpoint, usable_checkpoint
from trainload.launching.checkpoints.retention import Retention
from trainload.launching.checkpoints.sharded_state import ShardedState, held
from trainload.launching.checkpoints.writer import EVALUATION, CheckpointWriter
from trainload.launching.run.contact import FileContact
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_state import Summary
from trainload.launching.worker.saving import Saver
from trainload.packaging.tensors import chunks

ONE = make_plan("single", 1)
TWO = make_plan("zero3", 2)
OTHERS = [
    make_plan("zero1", 3, BY_GROUP),
    make_plan("hybrid", 4, TURNED),
    make_plan("zero3", 5, ONE_EACH, gap=1),
]


def steps(kept: Kept) -> list[int]:
    return list(kept.place.published())


def needed(kept: Kept) -> set[str]:
    """Return the paths of the files that make up the published checkpoints."""
    found = set()
    for where in kept.place.published().values():
        checkpoint = Checkpoint.open(where)
        folder = str(checkpoint.path).rstrip("/").rpartition("/")[2]
        found |= {
            f"{folder}/{name}"
            for name in ("index.json", *(file.name for file in checkpoint.index.files))
        }
    return found


@pytest.mark.matrix("folder-zero1 of 3", "folder-zero3 of 5")
@pytest.mark.parametrize("read", OTHERS, ids=lambda plan: f"{plan.strategy} of {plan.world_size}")
def test_what_was_written_is_read_under_another_plan(kept: Kept, read: object) -> None:
    assert read in OTHERS
    plan = next(each for each in OTHERS if each is read)
    checkpoint = Checkpoint.open(save_in(kept.place, TWO, 3))
    checkpoint.verify()
    for rank in range(plan.world_size):
        assert_same(load_sharded(checkpoint, plan, rank), make_state(plan, rank))


def test_a_checkpoint_is_its_index_and_its_shards_and_nothing_is_left_beside(kept: Kept) -> None:
    save_in(kept.place, TWO, 3)
    assert set(kept.files()) == needed(kept)
    assert len(kept.files()) == 3


def test_the_shards_are_the_same_bytes_everywhere(kept: Kept, tmp_path: Path) -> None:
    elsewhere = Checkpoint.open(save_in(kept.place, TWO, 3)).index
    here = Checkpoint.open(save_in(place_of(tmp_path / "local"), TWO, 3)).index
    assert [(file.size, file.chunks) for file in elsewhere.files] == [
        (file.size, file.chunks) for file in here.files
    ]


@pytest.mark.matrix("folder")
def test_the_oldest_are_deleted_with_their_shards(kept: Kept) -> None:
    for step in (10, 20, 30, 40):
        save_in(kept.place, TWO, step, keep_last=2)
    assert steps(kept) == [30, 40]
    assert set(kept.files()) == needed(kept)
    assert len(kept.files()) == 6


@pytest.mark.matrix("folder")
def test_the_best_are_kept_by_what_checkpoints_say_of_themselves(kept: Kept) -> None:
    for attempt, found in (("t1", ((1, 2.0), (2, 0.5))), ("t2", ((3, 1.0), (4, None)))):
        writer = CheckpointWriter(kept.place, ONE, 0, attempt, keep=Retention(1, best=1))
        for step, loss in found:
            writer.save(step, make_state(ONE, 0), DATA, {} if loss is None else {EVALUATION: loss})
            writer.wait()
    assert steps(kept) == [2, 4]


def test_a_step_reached_again_replaces_its_checkpoint(kept: Kept) -> None:
    for step in (10, 20):
        save_in(kept.place, TWO, step)
    again = save_in(kept.place, TWO, 10, salt=1, attempt="t2")
    assert steps(kept) == [10, 20]
    assert load_sharded(Checkpoint.open(again), ONE, 0).scalars["bucket0"]["step"].item() == 8.0
    assert set(kept.files()) == needed(kept)


@pytest.mark.matrix("s3")
def test_nothing_is_published_before_all_ranks_have_written(kept: Kept) -> None:
    first, second = writers(kept.place, TWO)
    first.save(1, make_state(TWO, 0), DATA, {})
    while not any(path.endswith(".safetensors") for path in kept.files()):
        time.sleep(0.01)
    assert steps(kept) == []
    second.save(1, make_state(TWO, 1), DATA, {})
    second.wait()
    assert steps(kept) == [1]
    first.wait()


@pytest.mark.matrix("s3")
def test_a_rank_that_never_writes_is_named_and_what_the_others_wrote_is_removed(kept: Kept) -> None:
    first, _ = writers(kept.place, TWO, timeout=0.2)
    first.save(1, make_state(TWO, 0), DATA, {})
    with pytest.raises(
        CheckpointError, match=r"did not write.*expected the part of rank 1 within 0.2 s"
    ):
        first.wait()
    assert [path for path in kept.files() if path.endswith(".safetensors")] == []


@pytest.mark.matrix("folder")
def test_a_rank_that_comes_after_rank_0_gave_up_is_told_at_once_and_the_next_save_works(
    kept: Kept,
) -> None:
    first = CheckpointWriter(kept.place, TWO, 0, "t1", timeout=0.2)
    first.save(1, make_state(TWO, 0), DATA, {})
    with pytest.raises(CheckpointError, match="rank 1 within"):
        first.wait()
    second = CheckpointWriter(kept.place, TWO, 1, "t1", timeout=60)
    second.save(1, make_state(TWO, 1), DATA, {})
    with pytest.raises(CheckpointError, match="rank 0: a rank did not write its part"):
        second.wait()
    first._timeout = 20.0
    for writer, rank in ((second, 1), (first, 0)):
        writer.save(1, make_state(TWO, rank), DATA, {})
    first.wait()
    second.wait()
    assert set(kept.files()) == needed(kept)


def test_a_rank_that_fails_tells_the_others(kept: Kept) -> None:
    first, second = writers(kept.place, TWO)
    state = make_state(TWO, 1)
    first.save(1, make_state(TWO, 0), DATA, {})
    second.save(
        1,
        ShardedState(
            {
                **state.flats,
                "bucket0": {
                    **state.flats["bucket0"],
                    "odd": torch.zeros(34, dtype=torch.complex128),
                },
            }
        ),
        DATA,
        {},
    )
    with pytest.raises(CheckpointError, match="complex128"):
        second.wait()
    with pytest.raises(CheckpointError, match=r"rank 1: a tensor has a dtype"):
        first.wait()
    assert steps(kept) == []


def test_the_next_attempt_removes_what_the_one_before_has_left_and_nothing_else(kept: Kept) -> None:
    save_in(kept.place, TWO, 5)
    kept.write("notes.txt", b"somebody else's")
    first, _ = writers(kept.place, TWO, attempt="t2", timeout=60)
    first.save(9, make_state(TWO, 0), DATA, {})  # to the next attempt, this one looks killed
    while not any(
        "step-00000009" in path and path.endswith(".safetensors") for path in kept.files()
    ):
        time.sleep(0.05)
    own, _ = writers(kept.place, TWO, attempt="t3", timeout=0.1)
    assert set(kept.files()) == needed(kept) | {"notes.txt"}
    own.save(10, make_state(TWO, 0), DATA, {})
    with pytest.raises(CheckpointError, match="rank 1"):
        own.wait()


def test_an_attempt_that_was_taken_for_dead_publishes_nothing_once_another_has_begun(
    kept: Kept,
) -> None:
    first, second = writers(kept.place, TWO, attempt="t1")
    first.save(9, make_state(TWO, 0), DATA, {})
    while not any(path.endswith(".safetensors") for path in kept.files()):
        time.sleep(0.05)
    save_in(kept.place, TWO, 9, salt=1, attempt="t2")
    second.save(9, make_state(TWO, 1), DATA, {})
    with pytest.raises((CheckpointError, StorageError)):
        first.wait()
    with pytest.raises((CheckpointError, StorageError)):
        second.wait()
    assert Checkpoint.open(kept.place.published()[9]).index.attempt == "t2"
    Checkpoint.open(kept.place.published()[9]).verify()


@pytest.mark.matrix(
    "folder-index.json-gone", "folder-rank-*-longer", "s3-index.json-gone", "s3-rank-*-cut"
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone"])
@pytest.mark.parametrize("file", ["index.json", "rank-00001-of-00002.safetensors"])
def test_a_damaged_newest_gives_way_to_the_one_before_with_the_reason(
    kept: Kept, damage: str, file: str
) -> None:
    older = save_in(kept.place, TWO, 10)
    save_in(kept.place, TWO, 20)
    path = next(
        path for path in kept.files() if path.startswith("step-00000020/") and path.endswith(file)
    )
    whole = kept.read(path)
    if damage == "gone":
        kept.delete(path)
    else:
        flipped = whole[:200] + bytes([whole[200] ^ 4]) + whole[201:]
        kept.write(path, {"flipped": flipped, "cut": whole[:-7], "longer": whole + b"x"}[damage])
    usable = usable_checkpoint(kept.place, patience=30.0)
    assert usable.path == older
    if damage == "gone" and file == "index.json":
        assert usable.rejected == ()  # no index, no checkpoint
    else:
        assert len(usable.rejected) == 1
        assert "step-00000020/" in usable.rejected[0]
        assert file in usable.rejected[0]


def test_a_rank_reads_what_it_holds_and_no_more_than_the_chunks_at_its_ends(
    bucket: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 2**16)
    length = large("zero3", 2).buckets[0].length
    ranks = writers(bucket.place, large("zero3", 2))
    for rank, writer in enumerate(ranks):
        start, stop = held(large("zero3", 2), large("zero3", 2).buckets[0], "param", rank)
        writer.save(
            3,
            ShardedState({"b": {"param": torch.arange(start, stop, dtype=torch.float32)}}),
            DATA,
            {},
        )
    for writer in ranks:
        writer.wait()
    counted: list[int] = []
    part = RemoteFiles.part

    def counting(files: RemoteFiles, path: str, start: int, stop: int) -> bytes:
        found = part(files, path, start, stop)
        counted.append(len(found))
        return found

    for rank in range(5):
        checkpoint = Checkpoint.open(bucket.place.published()[3])
        counted.clear()
        monkeypatch.setattr(RemoteFiles, "part", counting)
        found = load_sharded(checkpoint, large("zero3", 5), rank).flats["b"]["param"]
        monkeypatch.setattr(RemoteFiles, "part", part)
        assert torch.equal(
            found, torch.arange(rank * length // 5, (rank + 1) * length // 5, dtype=torch.float32)
        )
        assert found.nbytes <= sum(counted) <= found.nbytes + 5 * 2**16 < length * 4


@pytest.mark.slow
def test_a_large_shard_is_sent_in_parts_and_not_copied_whole(
    bucket: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_STREAM_PART", 5 * 2**20)
    count = 12 * 2**20
    plan = large("single", 1)
    slot = plan.buckets[0].slots[0].model_copy(update={"length": count, "shape": (count,)})
    plan = plan.model_copy(
        update={
            "buckets": (plan.buckets[0].model_copy(update={"length": count, "slots": (slot,)}),)
        }
    )
    values = torch.arange(count, dtype=torch.float32)
    writer = CheckpointWriter(bucket.place, plan, 0, "t1")
    writer.save(1, ShardedState({"b": {"param": values}}), DATA, {})
    writer.wait()
    tracemalloc.start()
    writer.save(2, ShardedState({"b": {"param": values}}), DATA, {})
    writer.wait()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * 2**20 < values.nbytes
    found = dict(full_parameters(Checkpoint.open(bucket.place.published()[2])))
    assert torch.equal(found["w"], values)


# Failing storage


def test_a_network_that_fails_for_a_while_costs_a_checkpoint_and_no_more(
    s3: str, bucket: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainload.launching.worker.saving._FIRST_PAUSE", 0.1)
    with wire_to(s3) as wire:
        place = bucket.place
        saver = Saver(
            CheckpointWriter(place, ONE, 0, "t1"),
            FileContact(tmp_path, 0, Summary()),
            None,
            leading=True,
            patience=60.0,
        )
        saver.save(1, make_state(ONE, 0), DATA, {})
        saver._writer.idle(60)
        wire.refuse = True
        wire.cut()
        began = time.monotonic()
        saver.save(2, make_state(ONE, 0, salt=1), DATA, {})
        assert time.monotonic() - began < 10.0  # far below the 60 seconds for which it is retried
        wait_until(lambda: saver.wanted)
        wire.refuse = False
        saver.finish(lambda: saver.save(3, make_state(ONE, 0, salt=2), DATA, {}))
        assert list(place.published()) == [1, 3]
        kinds = [event.kind for event in read_events(tmp_path)]
        assert kinds == ["stage", "checkpoint", "stage", "warning", "stage", "checkpoint"]
        assert (
            "s3://"
            in next(event for event in read_events(tmp_path) if event.kind == "warning").data[
                "message"
            ]
        )
        assert set(bucket.files()) == needed(bucket)


def test_a_place_that_cannot_be_reached_is_asked_again_and_no_older_checkpoint_is_taken(
    s3: str, bucket: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainload.launching.checkpoints.reader._PAUSE_SECONDS", 0.05)
    for step in (1, 2):
        newest = save_in(bucket.place, ONE, step)
    with wire_to(s3) as wire:
        place = bucket.place
        wire.refuse = True
        with pytest.raises(StorageError, match="cannot be reached"):
            usable_checkpoint(place)

        before = wire.refused

        def repair() -> None:
            wait_until(lambda: wire.refused > before)
            wire.refuse = False

        repairing = threading.Thread(target=repair)
        repairing.start()
        assert usable_checkpoint(place, patience=60.0).path == newest
        repairing.join()


def test_an_upload_that_hangs_holds_no_step_and_ends_in_time(
    s3: str, bucket: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainload.launching.worker.saving._HOLD_SECONDS", 0.1)
    monkeypatch.setattr("trainload.launching.worker.saving._FIRST_PAUSE", 0.1)
    with wire_to(s3) as wire:
        saver = Saver(
            CheckpointWriter(bucket.place, ONE, 0, "t1"),
            FileContact(tmp_path, 0, Summary()),
            None,
            leading=True,
            patience=60.0,
        )
        wire.silent = True
        with monkeypatch.context() as impatient:
            impatient.setattr(bounded_files, "SECONDS", 1.5)
            for step in range(1, 4):
                saver.save(step, make_state(ONE, 0), DATA, {})
                assert saver._writer.writing  # still uploading: no save waited for it
            wait_until(lambda: saver.wanted)
        wire.silent = False
        wire.cut()
        saver.finish(lambda: saver.save(4, make_state(ONE, 0), DATA, {}))
    said = [event.data["message"] for event in read_events(tmp_path) if event.kind == "warning"]
    assert len(said) == 2
    assert "the checkpoint of step 2 is delayed" in said[0]
    assert "does not respond" in said[1]
    assert steps(bucket) == [4]


def test_a_checkpoint_that_was_put_off_is_wanted_when_the_one_before_is_done(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainload.launching.worker.saving._HOLD_SECONDS", 0.05)
    gate = threading.Event()

    def wait() -> None:
        gate.wait(30)

    writer = CheckpointWriter(kept.place, ONE, 0, "t1", before_publishing=wait)
    saver = Saver(writer, FileContact(tmp_path, 0, Summary()), None, leading=True, patience=60.0)
    saver.save(1, make_state(ONE, 0), DATA, {})
    saver.save(2, make_state(ONE, 0), DATA, {})
    early = saver.wanted
    gate.set()
    while not saver.wanted:
        time.sleep(0.01)
    assert not early
    saver.save(3, make_state(ONE, 0), DATA, {})
    assert saver._finish_last_save() is None
    assert steps(kept) == [1, 3]


def test_a_place_is_told_what_was_tried_of_it(s3: str, tmp_path: Path) -> None:
    with pytest.raises(
        StorageError,
        match=(
            rf"s3://no-such-{BUCKET}/run: checkpoints cannot be stored here \(expected to write"
            r" probe-.*got .*bucket"
        ),
    ):
        place_of(tmp_path, f"s3://no-such-{BUCKET}/run").check_new()
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError,
        match=r"file/kept: the folder of the checkpoints cannot be written.*got a file",
    ):
        place_of(tmp_path, str(tmp_path / "file" / "kept")).check_new()
    with pytest.raises(StorageError, match="nosuch://"):
        place_of(tmp_path, "nosuch://x/y").check_new()


def test_a_place_that_may_be_written_is_left_as_it_was(kept: Kept) -> None:
    kept.place.check_new()
    assert not kept.is_folder or not Path(kept.url.removeprefix("file://")).exists()
    save_in(kept.place, ONE, 3)
    before = kept.files()
    kept.place.check_writable()
    assert kept.files() == before
    with pytest.raises(StorageError, match="checkpoints already exist here"):
        kept.place.check_new()


@pytest.mark.matrix("folder")
def test_the_latest_is_the_highest_step(kept: Kept) -> None:
    assert latest_checkpoint(kept.place) is None
    save_in(kept.place, ONE, 9)
    newest = save_in(kept.place, ONE, 100_000_000)
    assert latest_checkpoint(kept.place) == newest


# Kills


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 25])
def test_a_kill_before_any_write_or_removal_leaves_a_whole_checkpoint_to_go_on_from(
    bucket: Kept, tmp_path: Path, stride: int
) -> None:
    status, told = ran(killed_uploader.main, bucket.url, stride, stride, cwd=tmp_path, seconds=500)
    assert status == 0, told
    lines = [line.split() for line in told.splitlines()]
    assert len(lines) > 20 // stride
    assert lines[-1][1:] == ["False", "20,30", "2", "0"]
    for _, _, visible, whole, garbage in lines:
        assert (0 if visible == "-" else len(visible.split(","))) == int(whole)
        assert garbage == "0"
    first = next(number for number, line in enumerate(lines) if line[2] != "-")
    assert all(line[2] != "-" for line in lines[first:])
    if stride == 1:
        assert {"10", "10,20", "20,30"} <= {line[2] for line in lines}


@pytest.mark.slow  # tests of folders and of a truncated shard cover the same code
def test_bits_that_change_anywhere_are_noticed(bucket: Kept) -> None:
    where = save_in(bucket.place, TWO, 3)
    rng = random.Random(0)
    for path, size in bucket.files().items():
        whole = bucket.read(path)
        for place in rng.sample(range(size * 8), 4):
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            bucket.write(path, bytes(changed))
            with pytest.raises(CheckpointError):
                Checkpoint.open(where).verify()
        bucket.write(path, whole)
    Checkpoint.open(where).verify()
