"""A launch that fails before its run starts removes what it has created, and nothing else."""

from __future__ import annotations

from pathlib import Path

from trainload.launching.run.run_folder import DRIVER_FOLDER, RUN_FILE, nothing_left


def begin(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / RUN_FILE).write_text("{}")


def test_what_a_launch_has_made_is_removed_with_the_folders_above(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    with nothing_left(run_dir) as prepared:
        begin(run_dir)
        prepared.made = True
    assert list(tmp_path.iterdir()) == []


def test_a_launch_that_loses_the_race_for_a_folder_leaves_the_winners(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    with nothing_left(run_dir):
        begin(run_dir)  # by the other launch
    assert (run_dir / RUN_FILE).exists()


def test_in_a_folder_that_was_there_only_the_run_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with nothing_left(tmp_path) as prepared:
        (tmp_path / RUN_FILE).write_text("{}")
        (tmp_path / DRIVER_FOLDER).mkdir()
        prepared.made = True
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_folder_that_was_handed_on_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    with nothing_left(run_dir) as prepared:
        begin(run_dir)
        prepared.made = prepared.handed = True
    assert (run_dir / RUN_FILE).exists()
