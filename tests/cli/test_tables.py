"""Tables of every command at 80 columns: no word or number is broken."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tests.launch.forked import json_said
from tests.launch.tiny import write_rows

import trainload
from trainload.cli import main as cli
from trainload.cli.view.column_table import Pairs
from trainload.packaging.package import Package

WIDE = 2000
LONG = (
    "a-folder-whose-name-is-longer-than-a-line-of-a-terminal-of-80-columns/with/a/path.safetensors"
)


@pytest.fixture(scope="module")
def folder(tiny: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a store with releases of it, and a plan, below a long path."""
    folder = tmp_path_factory.mktemp("tables") / "-".join(["a-folder-with-a-long-name"] * 3)
    folder.mkdir()
    data = write_rows(folder / "rows.npz", 64)
    words: list[str | Path] = [
        "launch",
        tiny.path,
        "--data",
        data,
        "--eval-data",
        data,
        "--backend",
        "local",
    ]
    options = ["--steps", "4", "--no-compile", "--run-dir", "runs/one", "--output", "trained.tl"]
    json_said(*words, *options, cwd=folder)
    trainload.push(tiny.path, str(folder / "store"), message="the first")
    trainload.push(folder / "trained.tl", str(folder / "store"), facts={"loss": 0.25})
    trainload.promote(str(folder / "store"), 1, reason="to compare")
    plan = trainload.plan(tiny, trainload.Cluster(devices_per_node=2), "zero3")
    (folder / "plan.json").write_text(plan.model_dump_json())
    return folder


TABLES = {
    "inspect": ["inspect", "trained.tl"],
    "diff": ["diff", "TINY", "trained.tl"],
    "show": ["show", "trained.tl"],
    "ops": ["ops", "trained.tl"],
    "ops --compat": ["ops", "trained.tl", "--compat"],
    "ops --set": ["ops", "trained.tl", "--set", "core"],
    "plan": ["plan", "trained.tl", "--devices-per-node", "2", "--strategy", "zero3"],
    "plan --device": ["plan", "trained.tl", "--device", "cpu-2-cores", "--nodes", "2"],
    "plan --explain": ["plan", "trained.tl", "--device", "h100", "--explain", "1"],
    "simulate": ["simulate", "trained.tl", "--plan", "plan.json"],
    "settings": ["settings"],
    "status": ["status", "runs/one"],
    "runs": ["runs", "runs"],
    "logs": ["logs", "runs/one"],
    "releases": ["releases", "store"],
    "history": ["history", "store"],
    "lineage": ["lineage", "store"],
    "gc": ["gc", "store", "--dry-run"],
    "report of a run": ["report", "runs/one", "-o", "run.html"],
    "report of a package": ["report", "trained.tl", "-o", "package.html"],
    "report of a store": ["report", "store", "-o", "store.html"],
    "debug": ["debug", "runs/one", "--step", "2", "--statistics"],
}


def printed(
    words: list[str], columns: int, tiny: Package, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Run a command in a terminal of this width; return the lines of its output."""
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out)
    status = cli.run([str(tiny.path) if word == "TINY" else word for word in words])
    monkeypatch.undo()
    assert status == 0
    return out.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_a_table_breaks_no_word_at_80_columns(
    command: str, folder: Path, tiny: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that change from call to call (ages, times) are compared by their form."""
    wide, narrow = (
        words_of(printed_in(folder, TABLES[command], columns, tiny, monkeypatch))
        for columns in (WIDE, 80)
    )
    assert {form(word) for word in wide} <= {form(word) for word in narrow}


def printed_in(
    folder: Path, words: list[str], columns: int, tiny: Package, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.chdir(folder)
    return printed(words, columns, tiny, monkeypatch)


def words_of(lines: list[str]) -> set[str]:
    return {word for line in lines for word in line.split()}


def form(word: str) -> str:
    """Return a word with each digit as 0, and numbers of several digits as one."""
    digits = "".join("0" if letter.isdigit() else letter for letter in word)
    while "00" in digits:
        digits = digits.replace("00", "0")
    return digits


def pairs(*values: str) -> list[str]:
    out = io.StringIO()
    rows = [(f"name {number}", Text(value)) for number, value in enumerate(values)]
    Console(file=out, width=80).print(Pairs(rows), crop=False)
    return out.getvalue().splitlines()


def test_a_word_that_is_longer_than_a_line_is_printed_whole() -> None:
    assert LONG in pairs(f"it is in {LONG} and elsewhere")[1].split()


def test_other_lines_fit_the_terminal() -> None:
    lines = pairs(" ".join(["several", "words"] * 30), LONG, "short")
    assert [cell_len(line) <= 80 for line in lines].count(False) == 1
    assert len(lines) == 8


def test_lines_of_a_value_stay_lines() -> None:
    assert [line.split() for line in pairs("one\ntwo")] == [["name", "0", "one"], ["two"]]
