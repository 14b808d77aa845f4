"""Checkpoints are published completely or not at all, and errors of the thread are reported."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.launch import killed_saver
from tests.launch.checkpoint_cases import DATA, make_plan, make_state, save_all, writers
from tests.ranks import end, ran, start

from trainload.core.atomic import replace_file
from trainload.core.errors import CheckpointError, StorageError
from trainload.core.storage import folder_files
from trainload.launching.checkpoints import writer as checkpoint_writer
from trainload.launching.checkpoints.checkpoint_place import Draft, place_of
from trainload.launching.checkpoints.index import INDEX, published
from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint, latest_checkpoint, usable_checkpoint
from trainload.launching.checkpoints.shard import write_shard
from trainload.launching.checkpoints.sharded_state import ShardedState
from trainload.launching.checkpoints.writer import CheckpointWriter
from trainload.sharding.plans.plan import Bucket, Slot

TWO = make_plan("zero3", 2)
ONE = make_plan("single", 1)


def visible(run: Path) -> list[str]:
    """Return the checkpoint folders of a run that contain shards, published or not."""
    folder = run / "checkpoints"
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*.safetensors")})


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    state = make_state(ONE, 0)
    writer = CheckpointWriter(place_of(tmp_path), ONE, 0, "t1")
    writer.save(1, state, DATA, {})
    for entries in state.flats.values():
        for flat in entries.values():
            flat.fill_(9.0)
    state.buffers["seen"].zero_()
    writer.wait()
    found = load_sharded(Checkpoint.open(tmp_path / "checkpoints" / "step-00000001"), ONE, 0)
    assert torch.equal(
        found.flats["bucket0"]["param"], make_state(ONE, 0).flats["bucket0"]["param"]
    )
    assert found.buffers["seen"].item() == 2**40 + 1


def test_host_memory_is_used_again(tmp_path: Path) -> None:
    writer = CheckpointWriter(place_of(tmp_path), ONE, 0, "t1")
    places = []
    for step in (1, 2):
        writer.save(step, make_state(ONE, 0), DATA, {})
        places.append({name: tensor.data_ptr() for name, tensor in writer._host.items()})
    writer.wait()
    assert places[0] == places[1]


def test_nothing_is_published_before_all_ranks_have_written(tmp_path: Path) -> None:
    first, second = writers(tmp_path, TWO)
    first.save(1, make_state(TWO, 0), DATA, {})
    while not list(tmp_path.rglob("*.safetensors")):
        time.sleep(0.01)
    assert published(tmp_path) == {}
    second.save(1, make_state(TWO, 1), DATA, {})
    second.wait()
    assert list(published(tmp_path)) == [1]
    first.wait()


def test_the_oldest_are_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_all(tmp_path, TWO, step, keep_last=3)
    assert visible(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]


def test_a_step_reached_again_replaces_its_checkpoint_and_deletes_nothing_newer(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30):
        save_all(tmp_path, TWO, step, keep_last=3)
    again = save_all(tmp_path, TWO, 20, salt=1, attempt="t2", keep_last=1)
    assert visible(tmp_path) == ["step-00000020", "step-00000030"]
    assert load_sharded(Checkpoint.open(again), ONE, 0).scalars["bucket0"]["step"].item() == 8.0


def test_drafts_of_earlier_attempts_are_removed_at_the_start(tmp_path: Path) -> None:
    save_all(tmp_path, ONE, 5)
    folder = tmp_path / "checkpoints"
    drafts = ("step-00000006/t1-00000002", "step-00000007/t2-00000001", "step-00000005/t1-00000009")
    # the last two are drafts of older versions
    for name in (*drafts, ".tmp-step-00000008-t1", ".tmp-deleted-step-00000001-t0"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rank-00000-of-00001.safetensors").touch()
    (folder / "step-00000005" / ".index.json.12ab.part").touch()
    writers(tmp_path, ONE, attempt="t2")
    assert visible(tmp_path) == ["step-00000005", "step-00000007"]
    assert sorted(path.name for path in (folder / "step-00000005").iterdir()) == [
        "index.json",
        "t1-00000001",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000007"]


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    first, _ = writers(tmp_path, TWO, timeout=0.2)
    first.save(1, make_state(TWO, 0), DATA, {})
    with pytest.raises(
        CheckpointError, match=r"did not write.*expected the part of rank 1 within 0.2 s"
    ):
        first.wait()
    assert visible(tmp_path) == []


def test_a_follower_learns_that_nothing_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = writers(tmp_path, TWO)

    def refuse(path: Path, data: bytes, *, durable: bool = True) -> None:
        if path.name == INDEX:
            raise OSError(errno.EIO, "Input/output error")
        replace_file(path, data, durable=durable)

    monkeypatch.setattr(folder_files, "replace_file", refuse)
    first.save(1, make_state(TWO, 0), DATA, {})
    second.save(1, make_state(TWO, 1), DATA, {})
    with pytest.raises(CheckpointError, match="Input/output error"):
        first.wait()
    with pytest.raises(
        CheckpointError, match=r"rank 0.* could not be written|rank 0 could not publish"
    ):
        second.wait()
    assert published(tmp_path) == {}
    writers(tmp_path, TWO, attempt="t2")
    assert visible(tmp_path) == []  # kept until then: the index may have been written


def test_an_error_of_the_thread_is_raised_by_the_next_save_and_only_once(tmp_path: Path) -> None:
    first, _ = writers(tmp_path, TWO, timeout=0.1)
    first.save(1, make_state(TWO, 0), DATA, {})
    with pytest.raises(CheckpointError, match="rank 1"):
        first.save(2, make_state(TWO, 0), DATA, {})
    first.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_any_rank_removes_the_draft_and_leaves_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    earlier = save_all(tmp_path, TWO, 10)
    name = f"rank-0000{rank}-of-00002.safetensors"

    def fill(draft: Draft, shard: str, tensors: dict[str, torch.Tensor]) -> object:
        record = write_shard(draft, shard, tensors)
        if shard == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return record

    monkeypatch.setattr(checkpoint_writer, "write_shard", fill)
    ranks = writers(tmp_path, TWO)
    for number, writer in enumerate(ranks):
        writer.save(20, make_state(TWO, number), DATA, {})
    with pytest.raises(
        StorageError, match="disk is full" if rank == 0 else "rank 1: the disk is full"
    ):
        ranks[0].wait()
    with pytest.raises((StorageError, CheckpointError), match=r"disk is full|could not publish"):
        ranks[1].wait()
    assert visible(tmp_path) == [earlier.name]
    assert usable_checkpoint(place_of(tmp_path)).path == earlier


def test_a_rank_that_comes_after_rank_0_gave_up_is_told_at_once_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    first = CheckpointWriter(place_of(tmp_path), TWO, 0, "t1", timeout=0.2)
    first.save(1, make_state(TWO, 0), DATA, {})
    with pytest.raises(CheckpointError, match="rank 1 within"):
        first.wait()
    second = CheckpointWriter(place_of(tmp_path), TWO, 1, "t1", timeout=60)
    second.save(1, make_state(TWO, 1), DATA, {})
    with pytest.raises(CheckpointError, match="rank 0: a rank did not write its part"):
        second.wait()
    assert visible(tmp_path) == []
    for writer, rank in ((second, 1), (first, 0)):
        writer.save(1, make_state(TWO, rank), DATA, {})
    first.wait()
    second.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_disk_that_is_really_full_is_told_and_the_next_save_works(tmp_path: Path) -> None:
    status, told = ran(fill_the_disk, tmp_path, cwd=tmp_path, seconds=100)
    assert status == 0, told
    assert "the disk is full: the checkpoint was not written" in told
    assert visible(tmp_path) == ["step-00000001", "step-00000003"]


def fill_the_disk(folder: Path) -> None:
    """Save three checkpoints with no space for the second one, and print its error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = CheckpointWriter(place_of(folder), ONE, 0, "t1")
    writer.save(1, make_state(ONE, 0), DATA, {})
    writer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    writer.save(2, make_state(ONE, 0), DATA, {})
    try:
        writer.wait()
    except StorageError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.save(3, make_state(ONE, 0), DATA, {})
    writer.wait()


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        CheckpointWriter(place_of(tmp_path / "file"), ONE, 0, "t1")


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(place_of(tmp_path), TWO, 0, "t1")
    with pytest.raises(
        CheckpointError, match=r"'bucket0', entry '\w+', zero3.*expected \(34,\), got \(68,\)"
    ):
        writer.save(1, make_state(ONE, 0), DATA, {})
    with pytest.raises(CheckpointError, match="plan's buckets"):
        writer.save(1, ShardedState({}), DATA, {})


@pytest.mark.parametrize("user", [{"x": float("nan")}, {"x": {1, 2}}, {"x": torch.zeros(1)}])
def test_user_state_that_is_not_json_is_refused_at_once(
    tmp_path: Path, user: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match="not JSON"):
        CheckpointWriter(place_of(tmp_path), ONE, 0, "t1").save(1, make_state(ONE, 0), DATA, user)


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    state = make_state(ONE, 0)
    writer = CheckpointWriter(place_of(tmp_path), ONE, 0, "t1")
    writer.save(
        1,
        ShardedState(state.flats, state.scalars, {"b": torch.zeros(2, dtype=torch.complex128)}),
        DATA,
        {},
    )
    with pytest.raises(CheckpointError, match=r"buffer/b.*got complex128"):
        writer.wait()
    assert visible(tmp_path) == []


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    save_all(tmp_path, TWO, 1)
    assert set(threading.enumerate()) <= before


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def demand_whole_after_kills(tmp_path: Path, stride: int) -> None:
    """Check that a process killed at a file operation leaves only complete checkpoints.

    One in `stride` operations is tried, beginning with the first.
    """
    status, told = ran(killed_saver.main, tmp_path / "runs", 1, stride, cwd=tmp_path)
    assert status == 0, told
    lines = [line.split() for line in told.splitlines()]
    assert len(lines) > 20
    assert lines[-1][1:] == ["False", "20,30", "2", "0"]
    for _, _, steps, whole, drafts in lines:
        assert (0 if steps == "-" else len(steps.split(","))) == int(whole)
        assert drafts == "0"
    # once step 10 is published, there is always a checkpoint to resume from
    first = next(number for number, line in enumerate(lines) if line[2] != "-")
    assert all(line[2] != "-" for line in lines[first:])
    assert {"10", "10,20", "20,30"} <= {line[2] for line in lines}


def test_a_kill_at_any_file_operation_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    demand_whole_after_kills(tmp_path, stride=3)


@pytest.mark.slow
def test_a_kill_at_every_file_operation_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    demand_whole_after_kills(tmp_path, stride=1)


WEIGHTS = 1 << 21


def save_for_ever(folder: Path, rank: int, attempt: str) -> None:
    """Save checkpoints as one of two ranks until the process is killed.

    Print the number of each step whose save has started.
    """
    slot = Slot(parameter="w", offset=0, length=WEIGHTS, shape=(WEIGHTS,))
    bucket = Bucket(name="b", dtype="float32", groups=("g",), length=WEIGHTS, slots=(slot,))
    writer = CheckpointWriter(
        place_of(folder), TWO.model_copy(update={"buckets": (bucket,)}), rank, attempt
    )
    latest = latest_checkpoint(place_of(folder))
    for step in itertools.count(Checkpoint.open(latest).index.step + 1 if latest else 1):
        writer.save(
            step, ShardedState({"b": {"param": torch.full((WEIGHTS // 2,), float(step))}}), DATA, {}
        )
        print(step, flush=True)


@pytest.mark.slow
def test_ranks_killed_at_random_moments_leave_whole_checkpoints_only(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    reached = 0
    for attempt in ("t0", "t1", "t2"):
        logs = [tmp_path / f"{attempt}-{rank}.log" for rank in range(2)]
        ranks = [
            start(
                save_for_ever,
                tmp_path / "run",
                rank,
                attempt,
                cwd=tmp_path,
                log=log,
                variables=os.environ,
            )
            for rank, log in enumerate(logs)
        ]
        while any(log_lines(log) < 2 for log in logs):  # the second save waits for the first
            assert all(rank.is_alive() for rank in ranks), [log.read_text() for log in logs]
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        end(ranks)
        for step, path in published(tmp_path / "run").items():
            checkpoint = Checkpoint.open(path)
            assert torch.equal(
                checkpoint.parameter_interval("w", "param", 0, WEIGHTS),
                torch.full((WEIGHTS,), float(step)),
            )
            reached = max(reached, step)
        assert len(published(tmp_path / "run")) <= 3
    assert reached >= 1
    assert latest_checkpoint(place_of(tmp_path / "run")) is not None


def log_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
