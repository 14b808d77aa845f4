"""A run's folder is created by exactly one process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.report.made import plan

from trainload.core.errors import StorageError
from trainload.launching.run import run_spec as spec
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import RunSpec, read_spec, write_spec

LINK = os.link


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "first"


def spec_of(run: Path, steps: int) -> RunSpec:
    return RunSpec(
        package="/packages/gpt.tl",
        data="/data/train.npz",
        digest="cd" * 32,
        plan=plan(),
        run_dir=str(run),
        steps=steps,
    )


def test_of_two_that_make_a_run_in_one_folder_at_the_same_moment_one_does(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(_folder: Path) -> None:
        monkeypatch.undo()
        write_spec(spec_of(run, 1))

    monkeypatch.setattr(spec, "check_new_run", overtaken)
    with pytest.raises(StorageError, match="a run already exists here"):
        write_spec(spec_of(run, 2))
    assert read_spec(run).steps == 1
    assert [path.name for path in run.iterdir()] == [RUN_FILE]


def test_a_link_whose_answer_was_lost_is_known_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(source: Path, target: Path) -> None:
        LINK(source, target)
        LINK(source, target)

    monkeypatch.setattr(os, "link", twice)
    write_spec(spec_of(run, 1))
    assert [path.name for path in run.iterdir()] == [RUN_FILE]


def test_a_run_is_made_where_there_are_no_links(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    write_spec(spec_of(run, 1))
    assert read_spec(run).steps == 1
    assert [path.name for path in run.iterdir()] == [RUN_FILE]


def test_nothing_is_left_of_a_folder_that_cannot_be_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(
        StorageError, match="the run's folder cannot be written: No space left on device"
    ):
        write_spec(spec_of(run, 1))
    assert not run.parent.exists()
