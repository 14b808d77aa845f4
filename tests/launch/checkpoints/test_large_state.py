"""Checkpoints of a state that is too large to be copied."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.checkpoint_cases import DATA, make_plan, make_state

from trainload.core.errors import StorageError
from trainload.launching.checkpoints import writer as checkpoint_writer
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.checkpoints.shard import write_shard
from trainload.launching.checkpoints.writer import CheckpointWriter

ONE = make_plan("single", 1)


@pytest.fixture(autouse=True)
def nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "COPIED", 0)
    monkeypatch.setattr(checkpoint_writer, "_WAIT_SECONDS", 0.05)


def test_a_state_that_is_not_copied_may_change_when_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()

    def write_late(*arguments: Any) -> Any:
        changed.wait(0.5)
        return write_shard(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_shard", write_late)
    state, waits = make_state(ONE, 0), []
    writer = CheckpointWriter(
        place_of(tmp_path), ONE, 0, "t1", writing_state=lambda: waits.append(1)
    )
    writer.save(1, state, DATA, {})
    for entries in state.flats.values():
        for flat in entries.values():
            flat.fill_(9.0)
    changed.set()
    writer.wait()
    found = load_sharded(Checkpoint.open(tmp_path / "checkpoints" / "step-00000001"), ONE, 0)
    expected = make_state(ONE, 0).flats["bucket0"]["param"]
    assert torch.equal(found.flats["bucket0"]["param"], expected)
    assert waits  # so the rank is not taken for one that hangs


def test_no_copy_is_kept(tmp_path: Path) -> None:
    writer = CheckpointWriter(place_of(tmp_path), ONE, 0, "t1")
    writer.save(1, make_state(ONE, 0), DATA, {})
    assert writer._host == {}
    writer.wait()


def test_a_failure_ends_the_wait_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_shard", refuse)
    writer = CheckpointWriter(place_of(tmp_path), ONE, 0, "t1")
    writer.save(1, make_state(ONE, 0), DATA, {})
    with pytest.raises(StorageError, match="No space left"):
        writer.wait()
