"""The program with streams that are closed or full, or whose encoding lacks characters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainload.cli import main as cli

LONG = "x" * 300
"""A name that no file system takes."""


def program(line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's line, in which $T is the program."""
    return subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env={**os.environ, "T": f"{sys.executable} -m trainload", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", ["settings", "settings --json", "completion bash", "--help"])
def test_a_closed_stdout_is_no_error(words: str, tmp_path: Path) -> None:
    done = program(f"$T {words} >&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr_leaves_the_exit_status(tmp_path: Path) -> None:
    assert program("$T verify missing.tl 2>&-", tmp_path).returncode == 2


@pytest.mark.parametrize("words", ["settings", "settings --json", "completion bash", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(words: str, tmp_path: Path) -> None:
    done = program(f"$T {words} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, "trainload: No space left on device\n")


def test_an_error_that_stdout_cannot_take_goes_to_stderr(tmp_path: Path) -> None:
    done = program("$T verify missing.tl --json >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "trainload: missing.tl: there is no such package\n",
    )


@pytest.mark.parametrize("words", ["settings", "settings --json", "--help"])
def test_a_reader_that_is_gone_gets_no_traceback(words: str, tmp_path: Path) -> None:
    assert program(f"$T {words} | true", tmp_path).stderr == ""


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    done = program("$T init 日.py", tmp_path, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "\\u65e5.py" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", LONG],
        ["status", LONG],
        ["freeze", "job.py:job", "-o", LONG],
        ["plan", LONG, "-o", "plan.json"],
        ["init", f"{LONG}.py"],
        ["dashboard", "--output", LONG],
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_the_system_rejects_is_an_error_of_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words) in (1, 2)
    error = capsys.readouterr().err
    assert LONG in error
    assert "File name too long" in error
    assert error.count("\n") == 1


def test_such_a_path_is_a_json_error_too(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.run(["inspect", LONG, "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit"], error["where"]) == ("StorageError", status, LONG)
