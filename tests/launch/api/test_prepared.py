"""A launch that fails before its run starts removes what it has created, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainload.core.errors import StorageError
from trainload.launching.run import driver
from trainload.launching.run.run_directory import RUN_FILE, removed_unless_kept


def begin(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / RUN_FILE).write_text("{}")


def test_what_a_launch_has_made_is_removed_with_the_folders_above(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    with removed_unless_kept(run_dir) as folder:
        begin(run_dir)
        folder.is_created = True
    assert list(tmp_path.iterdir()) == []


def test_a_launch_that_loses_the_race_for_a_folder_leaves_the_winners(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    with removed_unless_kept(run_dir):
        begin(run_dir)  # by the other launch
    assert (run_dir / RUN_FILE).exists()


def test_in_a_folder_that_was_there_only_the_run_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    (tmp_path / "old").mkdir()
    with removed_unless_kept(tmp_path) as folder:
        (tmp_path / RUN_FILE).write_text("{}")
        (tmp_path / driver.FOLDER / "leases").mkdir(parents=True)
        folder.is_created = True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "old"]


def test_a_folder_that_another_process_may_use_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    with removed_unless_kept(run_dir) as folder:
        begin(run_dir)
        folder.is_created = folder.is_kept = True
    assert (run_dir / RUN_FILE).exists()


def test_a_run_that_is_kept_stays_although_its_storage_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> None:
        raise OSError(5, "Input/output error")

    def work() -> None:
        with removed_unless_kept(tmp_path / "one") as folder:
            begin(tmp_path / "one")
            folder.is_created = folder.is_kept = True
            monkeypatch.setattr("os.stat", fail)
            raise StorageError("the run's folder cannot be written")

    with pytest.raises(StorageError, match="cannot be written"):
        work()
    monkeypatch.undo()
    assert (tmp_path / "one" / RUN_FILE).exists()
