"""Ctrl-C ends every long command with one line, and leaves no partial file behind."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.forked import command, done, left_in
from tests.launch.tiny import Tiny, tiny_job, write_rows
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.packaging.package import Package

JOB = "from tests.launch.tiny import tiny_job\n\n\ndef job():\n    return tiny_job()\n"
PASS = "trainload.passes:eliminate_dead_code"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def interrupt_at_first_write() -> None:
    """Send this process SIGINT when it first writes something below its working directory."""
    _interrupt(functools.partial(_is_write, os.getcwd()))


def interrupt_at_first_read() -> None:
    """Send this process SIGINT when it first reads a file of a package beside its manifest."""
    names = {path.name for path in Path("tiny.tl").rglob("*") if path.is_file()}
    _interrupt(functools.partial(_is_read, frozenset(names - {"manifest.json"})))


def _interrupt(is_moment: Any) -> None:
    waiting = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal waiting
        if waiting and is_moment(event, arguments):
            waiting = False
            os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(hook)


def _is_write(folder: str, event: str, arguments: tuple[Any, ...]) -> bool:
    if event not in ("open", "os.mkdir"):
        return False
    path = os.path.abspath(os.fsdecode(arguments[0])) if _is_path(arguments[0]) else ""
    if not path.startswith(folder) or "__pycache__" in path:
        return False
    return event == "os.mkdir" or bool(int(arguments[2] or 0) & WRITES)


def _is_read(names: frozenset[str], event: str, arguments: tuple[Any, ...]) -> bool:
    return (
        event == "open"
        and _is_path(arguments[0])
        and os.path.basename(os.fsdecode(arguments[0])) in names
    )


def _is_path(value: object) -> bool:
    return isinstance(value, str | bytes | os.PathLike)


WRITING = {
    "freeze": ["freeze", "mine.py:job", "-o", "new.tl"],
    "pull": ["pull", "store", "-o", "new.tl"],
    "push": ["push", "tiny.tl", "another store"],
    "gc": ["gc", "store"],
    "export": ["export", "tiny.tl", "--to", "pt2", "--graph", "eval", "-o", "new.pt2"],
    "ops": ["ops", "tiny.tl", "--set", "core", "-o", "new.tl"],
    "transform": ["transform", "tiny.tl", "--pass", PASS, "-o", "new.tl"],
    "fill": ["fill", "tiny.tl", "--weights", "other.tl", "-o", "new.tl"],
    "migrate": ["migrate", "tiny.tl", "--from", "other.tl", "-o", "new.tl"],
    "plan": ["plan", "tiny.tl", "--device", "cpu-2-cores", "-o", "new.json"],
    "report": ["report", "tiny.tl", "-o", "new.html"],
    "build": ["build", "tiny.tl", "--plan", "plan.json", "-o", "new-build"],
}
READING = {
    "verify": ["verify", "tiny.tl"],
    "simulate": ["simulate", "tiny.tl", "--plan", "plan.json"],
    "plan": ["plan", "tiny.tl", "--device", "cpu-2-cores"],
    "export": ["export", "tiny.tl", "--to", "pt2", "--graph", "eval", "-o", "new.pt2"],
    "push": ["push", "tiny.tl", "another store"],
    "debug": ["debug", "tiny.tl", "--data", "rows.npz"],
    "evaluate": ["evaluate", "tiny.tl", "--data", "rows.npz", "--backend", "local", "--no-compile"],
}
ELSEWHERE = frozenset({"launch", "resume", "stop", "profile", "retrain", "measure", "diff"})
"""Commands with tests of their own, below or with those of runs and ticks, or that only wait for a
run (stop, profile).
"""
SHORT = frozenset(
    {"init", "completion", "dashboard", "inspect", "show", "settings", "manifest", "status"}
    | {"doctor", "logs", "runs", "releases", "sign", "promote", "rollback", "history", "lineage"}
)
"""Commands that read or write a few records, or that make many short checks (doctor)."""
PARTIAL_IS_KEPT = ("push", "gc")
"""Commands whose partial results remain: files that a push has sent, and the lease of gc."""
QUICK = ("writes: freeze", "reads: verify")
CASES = {
    **{f"writes: {name}": (interrupt_at_first_write, words) for name, words in WRITING.items()},
    **{f"reads: {name}": (interrupt_at_first_read, words) for name, words in READING.items()},
}


@pytest.fixture
def folder(tiny: Package, tmp_path: Path) -> Path:
    """A working directory with a job, packages, rows, a plan and a store."""
    shutil.copytree(tiny.path, tmp_path / "tiny.tl")
    shutil.copytree(tiny.path, tmp_path / "other.tl")
    (tmp_path / "mine.py").write_text(JOB)
    write_rows(tmp_path / "rows.npz", 32)
    plan = trainload.plan(tiny, trainload.Cluster())
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    trainload.push(tmp_path / "tiny.tl", str(tmp_path / "store"))
    return tmp_path


@pytest.fixture
def other(folder: Path) -> Path:
    """Another package of the same job, with other weights."""
    torch.manual_seed(1)
    job = dataclasses.replace(tiny_job(), model=Tiny())
    shutil.rmtree(folder / "other.tl")
    trainload.freeze(job, folder / "other.tl")
    return folder


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id=case)
        for case in CASES
    ],
)
def test_an_interrupted_command_leaves_nothing_and_can_be_repeated(case: str, folder: Path) -> None:
    moment, words = CASES[case]
    before = files(folder)
    status, out, err = done(*words, cwd=folder, first=moment)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "trainload: interrupted"
    assert "Traceback" not in err
    if words[0] not in PARTIAL_IS_KEPT:
        assert files(folder) == before
    status, _, err = done(*words, cwd=folder)
    assert status == 0, err


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_nothing_and_can_be_repeated(other: Path) -> None:
    before, words = files(other), ["diff", "tiny.tl", "other.tl"]
    status, out, err = done(*words, cwd=other, first=interrupt_at_first_read)
    assert (status, out, err.strip()) == (1, "", "trainload: interrupted")
    status, out, err = done(*words, cwd=other)
    assert "weights" in out, err
    assert files(other) == before


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["matrix products", "collectives"])
def test_an_interrupted_measurement_leaves_nothing(moment: str, tmp_path: Path) -> None:
    with command("measure", "-o", "mine.json", cwd=tmp_path, first=os.setsid) as started:
        leader = started.process.pid
        assert leader is not None
        # the file of its messages is created when the process has started
        wait_until(lambda: f"measuring {moment}" in (started.err if started.has_begun else ""))
        os.killpg(leader, signal.SIGINT)
        assert started.wait() == 1
        assert started.err.splitlines()[-1] == "trainload: interrupted"
        assert "Traceback" not in started.err
        assert left_in(leader) == []
    assert files(tmp_path) == set()


def test_an_interrupt_while_the_program_is_imported_is_one_line(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'import' and arguments[0] == 'click':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(hook)\n"
        "sys.argv = ['trainload', 'settings']\n"
        "from trainload.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "trainload: interrupted\n")


def test_every_command_that_can_take_long_is_interrupted() -> None:
    tested = {words[0] for _, words in CASES.values()} | ELSEWHERE
    assert tested | SHORT == set(cli.commands.commands)
    assert not tested & SHORT
