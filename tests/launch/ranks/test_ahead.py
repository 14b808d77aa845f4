"""Compilation for other numbers of nodes during a run; a failure does not affect the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.report.made import plan

from trainload.launching.ranks import ahead
from trainload.launching.run.contact import FileContact
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.run.run_state import Summary


def spec_of(run: Path, **fields: Any) -> RunSpec:
    package = str(run / "gone.tl")
    return RunSpec(
        package=package,
        data="/data/train.npz",
        digest="cd" * 32,
        plan=plan(),
        run_dir=str(run),
        steps=1,
        **fields,
    )


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ahead"]


NOTHING: dict[str, dict[str, Any]] = {
    "no other plans": {},
    "a run that is not compiled": {"plans": (plan(2),), "compile": False},
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_there_is_nothing_to_compile_no_process_begins(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "can_compile", lambda: True)
    ahead.compile_ahead(spec_of(tmp_path, **NOTHING[name]), 1, FileContact(tmp_path, 0, Summary()))
    assert running() == []


def test_a_process_that_fails_is_a_warning_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "can_compile", lambda: True)
    ahead.compile_ahead(spec_of(tmp_path, plans=(plan(2),)), 1, FileContact(tmp_path, 0, Summary()))
    for thread in running():
        thread.join()
    (event,) = read_events(tmp_path)
    assert event.kind == "warning"
    assert event.data["message"].startswith("compiling ahead for other numbers of nodes failed: ")
    assert "gone.tl" in event.data["message"]
