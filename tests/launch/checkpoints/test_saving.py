"""A run whose storage fails when a checkpoint is due."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.checkpoint_cases import DATA, make_plan, make_state

from trainload.core.errors import CheckpointError, StorageError
from trainload.launching.checkpoints import writer as checkpoint_writer
from trainload.launching.checkpoints.checkpoint_place import Draft, place_of
from trainload.launching.checkpoints.index import published
from trainload.launching.checkpoints.shard import write_shard
from trainload.launching.checkpoints.writer import CheckpointWriter
from trainload.launching.run.contact import FileContact
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_state import Summary
from trainload.launching.worker.saving import Saver

ONE = make_plan("single", 1)


def saver(folder: Path, patience: float = 30.0) -> Saver:
    return Saver(
        CheckpointWriter(place_of(folder), ONE, 0, "t1"),
        FileContact(folder, 0, Summary()),
        None,
        leading=True,
        patience=patience,
    )


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Make the first `times` writes of shards fail; return the names of all attempted shards."""
    tried: list[str] = []
    write = write_shard

    def flaky(draft: Draft, name: str, tensors: Any) -> Any:
        tried.append(name)
        if len(tried) <= times:
            raise OSError(5, "Input/output error")
        return write(draft, name, tensors)

    monkeypatch.setattr(checkpoint_writer, "write_shard", flaky)
    monkeypatch.setattr("trainload.launching.worker.saving._FIRST_PAUSE", 0.01)
    return tried


def said(folder: Path) -> list[str]:
    return [event.kind for event in read_events(folder)]


def wait(saver: Saver) -> bool:
    """Wait for the end of the save, and return whether another one is wanted at once."""
    while saver._writer.writing:
        time.sleep(0.01)
    return saver.wanted


def await_wanted(saver: Saver) -> None:
    while not saver.wanted:
        time.sleep(0.01)


def test_a_checkpoint_is_told_of_when_it_is_published(tmp_path: Path) -> None:
    one = saver(tmp_path)
    one.save(4, make_state(ONE, 0), DATA, {})
    assert not wait(one)
    event = read_events(tmp_path)[-1]
    assert event.kind == "checkpoint"
    assert event.data["step"] == 4
    assert event.data["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*.safetensors")
    )


def test_a_checkpoint_that_fails_is_wanted_again_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 1)
    one = saver(tmp_path)
    one.save(4, make_state(ONE, 0), DATA, {})
    wait(one)
    await_wanted(one)
    one.save(5, make_state(ONE, 0), DATA, {})
    assert not wait(one)
    assert list(published(tmp_path)) == [5]
    assert said(tmp_path) == ["stage", "warning", "stage", "checkpoint"]


def test_the_last_checkpoint_is_tried_until_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = failing(monkeypatch, 3)
    one = saver(tmp_path)
    one.finish(lambda: one.save(9, make_state(ONE, 0), DATA, {}))
    assert len(tried) == 4
    assert list(published(tmp_path)) == [9]


def test_storage_that_fails_for_too_long_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 10**6)
    one = saver(tmp_path, patience=0.2)
    with pytest.raises((CheckpointError, StorageError), match="Input/output error"):
        one.finish(lambda: one.save(9, make_state(ONE, 0), DATA, {}))
    assert published(tmp_path) == {}
