"""Command line: help, exit status, errors."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainload.cli import main as cli
from trainload.cli.commands import runs, shared
from trainload.core.errors import PlanError, RunInterrupted
from trainload.sharding.plans.plan import read_plan

COMMANDS = (
    "init",
    "completion",
    "freeze",
    "inspect",
    "verify",
    "sign",
    "diff",
    "show",
    "ops",
    "transform",
    "fill",
    "export",
    "plan",
    "simulate",
    "measure",
    "profile",
    "build",
    "launch",
    "resume",
    "settings",
    "status",
    "logs",
    "stop",
    "runs",
    "report",
    "dashboard",
    "doctor",
    "push",
    "pull",
    "releases",
    "promote",
    "gc",
    "evaluate",
    "rollback",
    "history",
    "lineage",
    "migrate",
)
GROUPS = {
    "manifest": ("kuberay", "trainjob"),
    "retrain": ("init", "schema", "check", "build", "tick", "run", "manifest", "handover"),
}
INNER = [(group, name) for group, names in GROUPS.items() for name in names]


def help_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*command, "--help"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in (*COMMANDS, *GROUPS)), *INNER],
    ids=lambda command: " ".join(command) or "trainload",
)
def test_help_fits_a_screen_of_80_by_24(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_text(monkeypatch, capsys, *command)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), *INNER], ids=" ".join)
def test_every_command_has_a_json_form(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(line.split()[:1] == ["--json"] for line in help_text(monkeypatch, capsys, *command))


def test_help_names_every_command_and_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(help_text(monkeypatch, capsys))
    assert [
        name
        for name in (*COMMANDS, *GROUPS)
        if not re.search(rf"(^|  ){name}  +[A-Z][^.]+\.", text, re.MULTILINE)
    ] == []
    assert "..." not in text.partition("Commands:")[2]


def test_help_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from trainload.cli.main import run; run(['launch', '--help']);"
        " sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.slow  # starts an interpreter
def test_the_console_script_exits_with_the_status() -> None:
    script = Path(sys.executable).with_name("trainload")
    assert (
        subprocess.run(
            [str(script), "inspect", "/nonexistent.tl"], capture_output=True, check=False
        ).returncode
        == 2
    )


def test_the_console_script_is_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="trainload")
    ran = []
    monkeypatch.setattr(cli, "main", lambda: ran.append("the command line"))
    script.load()()
    assert ran == ["the command line"]


def test_the_level_of_log_messages_is_set_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINLOAD_LOG_LEVEL", "loud")
    assert cli.run(["settings"]) == 2
    assert "TRAINLOAD_LOG_LEVEL is 'loud', expected one of debug" in capsys.readouterr().err


BAD_REQUESTS = {
    "no such package": ["inspect", "none.tl"],
    "no such package to verify": ["verify", "none.tl"],
    "no such package to sign": ["sign", "none.tl", "--key", "key.pem"],
    "no such package to compare": ["diff", "none.tl", "other.tl"],
    "a chain without a certificate": ["sign", "none.tl", "--key", "key.pem", "--chain", "ca.pem"],
    "a policy where none is asked": ["--policy", "policy.toml", "inspect", "none.tl"],
    "no such package to plan": ["plan", "none.tl"],
    "no such package to export": ["export", "none.tl", "--to", "pt2"],
    "an export of no kind": ["export", "none.tl"],
    "no such package to show": ["show", "none.tl", "--module", "layers.3"],
    "no such package to list operators of": ["ops", "none.tl"],
    "no such package to transform": ["transform", "none.tl", "--pass", "m:f", "-o", "new.tl"],
    "no such package to fill": ["fill", "none.tl", "--weights", "w", "-o", "new.tl"],
    "no weights to fill with": ["fill", "none.tl", "-o", "new.tl"],
    "no pass": ["transform", "none.tl", "-o", "new.tl"],
    "an operator set chosen twice": ["ops", "none.tl", "--set", "core", "--interactive"],
    "a package of no chosen set": ["ops", "none.tl", "-o", "new.tl"],
    "no such package to compare operators of": ["ops", "none.tl", "--compat"],
    "a comparison and a set": ["ops", "none.tl", "--compat", "--set", "core"],
    "a source of weights for a package with weights": [
        "freeze",
        "job.py:job",
        "-o",
        "out.tl",
        "--weights",
        "init",
    ],
    "no such package to launch": ["launch", "none.tl", "--data", "d.parquet"],
    "no such run": ["resume", "none"],
    "no such run to report": ["report", "none"],
    "no such folder for a board": ["dashboard", "--output", "none/board.json"],
    "no such package to push": ["push", "none.tl", "store"],
    "a release that is rejected and promoted": [
        "push",
        "none.tl",
        "store",
        "--reject",
        "worse",
        "--promote",
    ],
    "a condition on no promotion": ["push", "none.tl", "store", "--no-promote", "--only-if", "3"],
    "a fact without a value": ["push", "none.tl", "store", "--fact", "loss"],
    "no such store to pull from": ["pull", "none", "-o", "new.tl"],
    "no such store to list": ["releases", "none"],
    "no such store to promote in": ["promote", "none", "1"],
    "no such store to clean": ["gc", "none"],
    "nothing to keep": ["gc", "none", "--keep", "0"],
    "a store of no known kind": ["releases", "nowhere://bucket/store"],
    "no such command": ["fly"],
    "no such option": ["inspect", "none.tl", "--fast"],
    "a number that is none": ["plan", "none.tl", "--nodes", "two"],
    "no workers": ["launch", "none.tl", "--data", "d.parquet", "--workers", "0"],
    "a plan beside workers": [
        "launch",
        "none.tl",
        "--data",
        "d.parquet",
        "--plan",
        "p.json",
        "--workers",
        "2",
    ],
    "no output": ["freeze", "job.py:job"],
    "a spec without a name": ["freeze", "job.py", "-o", "out.tl"],
    "a spec whose file is missing": ["freeze", "none.py:job", "-o", "out.tl"],
    "a spec whose module is missing": ["freeze", "no_such_module_anywhere:job", "-o", "out.tl"],
}


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("arguments", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_wrong_request_exits_with_2_and_one_line(
    arguments: list[str], empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_wrong_request_leaves_nothing_behind(arguments: list[str], empty: Path) -> None:
    cli.run(arguments)
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("arguments", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_wrong_request_with_json_prints_an_error_object(
    arguments: list[str], empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["exit"] == 2


def test_freeze_does_not_overwrite(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "out.tl").mkdir()
    assert cli.run(["freeze", "none.py:job", "-o", "out.tl"]) == 2
    assert "out.tl: it exists already" in capsys.readouterr().err


def test_a_file_that_is_no_plan_is_refused(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "plan.json").write_text('{"version": 1}')
    with pytest.raises(PlanError, match="this is not a plan"):
        read_plan(Path("plan.json"))


def test_ctrl_c_says_how_to_resume(empty: Path) -> None:
    def work(_report: object) -> None:
        raise KeyboardInterrupt

    (empty / "my run").mkdir()
    (empty / "my run" / "run.json").touch()
    with pytest.raises(RunInterrupted, match=r"Continue with: trainload resume 'my run'"):
        runs._watch(work, Path("my run"))


def test_ctrl_c_before_the_run_began_says_so(empty: Path) -> None:
    def work(_report: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(RunInterrupted, match=r"It had not started: launch it again"):
        runs._watch(work, Path("my run"))


def test_an_error_of_ours_that_is_no_request_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, empty: Path
) -> None:
    def fails(_path: Path) -> None:
        raise RunInterrupted("stopped")

    monkeypatch.setattr(shared, "open_package", fails)
    assert cli.run(["ops", "x.tl"]) == 1


def test_any_other_error_is_not_turned_into_a_line(
    monkeypatch: pytest.MonkeyPatch, empty: Path
) -> None:
    def fails(_path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(shared, "open_package", fails)
    with pytest.raises(ZeroDivisionError):
        cli.run(["ops", "x.tl"])
