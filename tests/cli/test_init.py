"""`trainload init` writes job files that can be frozen and trained as they are."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.forked import json_said

from trainload.cli import main as cli
from trainload.cli.commands.setup.starting import KINDS


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def next_commands(text: str) -> list[list[str]]:
    """Return the arguments of the commands that the output suggests."""
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("trainload ")]


@pytest.mark.parametrize(
    "kind",
    [
        "module",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("transformers", "trainer")),
    ],
)
def test_the_next_commands_freeze_and_train_the_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", f"my_{kind}.py", "--kind", kind]) == 0
    freeze, launch = next_commands(capsys.readouterr().out)
    json_said(*freeze, cwd=tmp_path)
    trained = json_said(*launch, "--steps", "5", "--no-compile", cwd=tmp_path)
    assert trained["steps"] == 5
    assert trained["last_loss"] < trained["first_loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_names_the_next_commands(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run(["init", "fresh.py", "--kind", kind])
    commands = next_commands(capsys.readouterr().out)
    assert next_commands((tmp_path / "fresh.py").read_text())[:2] == commands


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_formatted_and_has_no_lint(kind: str, tmp_path: Path) -> None:
    cli.run(["init", "fresh.py", "--kind", kind])
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, *settings, "--no-cache", "fresh.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_the_file_is_named_job_by_default(tmp_path: Path) -> None:
    assert cli.run(["init"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_a_folder_is_created_for_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", "a new/project", "--json"]) == 0
    assert (tmp_path / "a new" / "project" / "job.py").is_file()
    written = json.loads(capsys.readouterr().out)
    assert (
        written["next"][0]
        == "trainload freeze 'a new/project/job.py:job' -o 'a new/project/job.tl'"
    )


def test_a_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text("mine = 1\n")
    assert cli.run(["init"]) == 2
    assert "job.py: it exists already" in capsys.readouterr().err
    assert (tmp_path / "job.py").read_text() == "mine = 1\n"


def test_a_file_that_would_hide_an_installed_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", "transformers.py", "--kind", "transformers"]) == 2
    assert "a module named transformers is installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_current_folder_is_no_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder is on the path of `python -m trainload`."""
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.run(["init"]) == 0
    assert cli.run(["init", "another"]) == 0


@pytest.mark.parametrize("name", ["my-job.py", "version-1.2.py", "__main__.py"])
def test_a_name_need_not_be_that_of_a_module(name: str, tmp_path: Path) -> None:
    assert cli.run(["init", name]) == 0
    assert (tmp_path / name).is_file()


@pytest.mark.parametrize("name", ['quo"te.py', "back\\slash.py", "new\nline.py", "b\udcffd.py"])
def test_a_name_that_a_docstring_cannot_hold_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", name]) == 2
    assert "cannot be written into a Python file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_looks_like_an_option_is_a_path_in_the_next_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["init", "--", "-x.py"]) == 0
    words = [word for command in next_commands(capsys.readouterr().out) for word in command]
    assert {"./-x.py:job", "./-x.tl", "python:./-x.py:rows"} <= set(words)


def test_a_file_in_place_of_the_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    assert cli.run(["init", "taken"]) == 2
    assert "taken: the folder cannot be created: File exists" in capsys.readouterr().err
