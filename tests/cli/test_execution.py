"""Execution of a command line: what a command holds until its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from tests.launch.commands import interrupt

from trainload.cli.commands.execution import hold_until_end, run_group
from trainload.core.errors import PackageError
from trainload.packaging.package import Package


@contextmanager
def slow_to_end() -> Iterator[None]:
    yield
    sys.stderr.write("ended\n")


@click.group()
def group() -> None:
    """Stand for the program."""


@group.command()
def fails() -> None:
    hold_until_end(slow_to_end())
    raise PackageError("there is no such package")


def test_an_error_is_reported_before_what_the_command_holds_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_group(group, ["fails"]) == 2
    assert capsys.readouterr().err == "trainload: there is no such package\nended\n"


CODE = """
import sys
from trainload.cli.main import run

status = run(sys.argv[1:])
print(status, "ray" in sys.modules)
"""


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
    assert done.stdout == "2 False\n", done.stderr
    assert "missing" in done.stderr


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
