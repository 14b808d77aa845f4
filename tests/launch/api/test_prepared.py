"""A launch that fails before its run starts removes what it has created, and nothing else."""

from __future__ import annotations

from pathlib import Path

from trainload.cli.commands.run_handover import nothing_left
from trainload.launching.run.run_spec import RUN_FILE


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


def test_a_folder_that_was_handed_on_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    with nothing_left(run_dir) as prepared:
        begin(run_dir)
        prepared.made = prepared.handed = True
    assert (run_dir / RUN_FILE).exists()
