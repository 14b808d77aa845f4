"""Execution of a command line: what a command holds until its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from tests.launch.commands import interrupt

from trainload.cli.commands import runs
from trainload.cli.commands.execution import hold_until_end, run_group
from trainload.cli.commands.keeping import KEPT
from trainload.core.errors import PackageError
from trainload.packaging.package import Package


@contextmanager
def slow_to_end(number: int | None) -> Iterator[None]:
    """Send a signal to this process at the end."""
    yield
    if number is not None:
        os.kill(os.getpid(), number)
    sys.stderr.write("ended\n")


@click.group()
def group() -> None:
    """Stand for the program."""


@group.command()
@click.option("--signal", "number", type=int)
def fails(number: int | None) -> None:
    hold_until_end(slow_to_end(number))
    raise PackageError("there is no such package")


def test_an_error_is_reported_before_what_the_command_holds_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_group(group, ["fails"]) == 2
    assert capsys.readouterr().err == "trainload: there is no such package\nended\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_that_ends_does_not_change_the_exit_status(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(number)
    assert run_group(group, ["fails", "--signal", str(int(number))]) == 2
    assert capsys.readouterr().err.endswith("ended\n")
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("missing.npz", False),
        ("python:rows.py:rows", True),
        ("s3://bucket/rows", True),
        ("store#line/3", True),
        ("rows-*.npz", True),
    ],
)
def test_only_a_path_is_known_to_be_missing(source: str, expected: bool) -> None:
    assert runs._may_exist(source) == expected


CODE = """
import signal, sys
from trainload.cli.main import run

before = signal.getsignal(signal.SIGTERM)
status = run(sys.argv[1:])
print(status, "ray" in sys.modules, signal.getsignal(signal.SIGTERM) is before)
"""


@pytest.mark.matrix("data")
@pytest.mark.parametrize("missing", ["package", "data"])
def test_a_launch_without_its_package_or_data_starts_no_cluster(
    missing: str, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    package = tmp_path / "missing.tl" if missing == "package" else tiny.path
    data = tmp_path / "missing.npz" if missing == "data" else tiny_data
    done = subprocess.run(
        [sys.executable, "-c", CODE, "launch", str(package), "--data", str(data)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 False True\n", done.stderr
    assert "missing" in done.stderr


@pytest.mark.slow  # starts a cluster
def test_a_launch_that_fails_after_it_has_begun_to_connect_restores_signals(
    tiny_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "damaged.tl").mkdir()
    arguments = ["launch", "damaged.tl", "--data", str(tiny_data), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    error, _, last = done.stdout.rstrip().rpartition("\n")
    assert json.loads(error)["error"]["exit"] == 2
    status, _, is_restored = last.split()
    assert (status, is_restored) == ("2", "True"), done.stderr


STUCK = """
import atexit, sys, threading
from trainload.cli.main import main
from trainload.launching.cluster import connection

def connect(address):
    threading.Event().wait()

connection._connect = connect
atexit.register(threading.Event().wait)
main()
"""


@pytest.mark.slow
def test_a_connection_that_is_never_made_does_not_keep_the_process(
    tiny_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "damaged.tl").mkdir()
    arguments = ["launch", "damaged.tl", "--data", str(tiny_data), "--address", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-c", STUCK, *arguments],
        cwd=tmp_path,
        env={**os.environ, KEPT: "run"},  # the driver, not the process that supervises it
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trainload: damaged.tl")


@pytest.mark.matrix("Ctrl-C")
@pytest.mark.parametrize("terminate", [True, False], ids=["SIGTERM", "Ctrl-C"])
def test_a_launch_that_is_ended_while_it_connects_leaves_nothing(
    terminate: bool, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def connects() -> bool:
        return any(temporary.glob("trainload-*"))

    ended = interrupt(
        ["launch", tiny.path, "--data", tiny_data, "--run-dir", "run"],
        tmp_path,
        connects,
        {"TMPDIR": str(temporary)},
        terminate=terminate,
    )
    assert (ended.status, ended.left) == (1, [])
    assert "trainload: interrupted" in ended.err
    assert not connects()
    assert not (tmp_path / "run").exists()
