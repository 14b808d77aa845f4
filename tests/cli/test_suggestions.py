"""Errors about an unknown name suggest the most similar known one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from tests.cli.test_overview import every_command
from tests.house.source import ROOT, face_files, stage_files
from tests.launch.tiny import Tiny, loss, token_rows

import trainload
from trainload.cli import main as cli
from trainload.cli.commands.shared import OneOf
from trainload.core.errors import TrainloadError
from trainload.core.suggestions import nearest
from trainload.packaging.package import Package

POD = ("--memory", "1Gi", "--claim", "c", "--")
TYPOS = {
    "a command": (["luanch"], "launch"),
    "a command of a group": (["retrain", "shcema"], "schema"),
    "an option": (["plan", "none.tl", "--stragety", "zero3"], "--strategy"),
    "an option of the program": (["--polcy", "p.toml", "launch"], "--policy"),
    "an option of a subcommand": (["retrain", "tick", "r.yaml", "--att", "now"], "--at"),
    "a choice": (["plan", "none.tl", "--recompute", "ful"], "full"),
    "a strategy": (["plan", "none.tl", "--strategy", "zro3/2"], "zero3"),
    "a schedule": (["plan", "none.tl", "--schedule", "zero-buble"], "zero-bubble"),
    "a division": (["plan", "none.tl", "--tensor", "2/sequense"], "sequence"),
    "a kind of device": (["launch", "none.tl", "--data", "d", "--workers", "1/cudda"], "cuda"),
    "a backend": (["launch", "none.tl", "--data", "d", "--backend", "locl"], "local"),
    "an export target": (["export", "none.tl", "--to", "hugginface"], "huggingface"),
    "a setting": (["launch", "none.tl", "--data", "d", "--set", "lr_rat=1"], "lr"),
    "a similar setting": (
        ["launch", "none.tl", "--data", "d", "--set", "presision=1"],
        "precision",
    ),
    "a value": (["launch", "none.tl", "--data", "d", "--set", "precision=bf61"], "bf16"),
    "a learning rate schedule": (
        ["launch", "none.tl", "--data", "d", "--set", "schedule=cosin:10"],
        "cosine",
    ),
    "a setting of an evaluation": (
        ["evaluate", "none.tl", "--data", "d", "--set", "keep=1", "--set", "eval_batch=2"],
        "eval_batches",
    ),
    "a launch option of a manifest": (
        ["manifest", "kuberay", "p.tl", "--data", "d", "--image", "i", *POD, "--eval-evry", "10"],
        "--eval-every",
    ),
    "a kind of schedule": (["retrain", "manifest", "cronjb", "r.yaml"], "cronjob"),
    "a shell": (["completion", "bsh"], "bash"),
    "a kind of job": (["init", "--kind", "transformer"], "transformers"),
}


@pytest.mark.parametrize(("words", "meant"), TYPOS.values(), ids=TYPOS.keys())
def test_a_typo_gets_a_suggestion(
    words: list[str],
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"Did you mean {meant}?")


def test_a_typo_in_a_sink_gets_a_suggestion(
    tiny: Package, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(tiny_data), "--run-dir", str(tmp_path / "run"), "--backend", "local"]
    assert cli.run(["launch", str(tiny.path), *options, "--set", "sinks=tensorbord"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("Did you mean tensorboard?")


@pytest.mark.parametrize("words", [TYPOS["a command"][0], TYPOS["a setting"][0]], ids=" ".join)
def test_the_json_form_has_the_suggestion_as_a_hint(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["hint"].startswith("Did you mean")


OF_A_PACKAGE = {
    "a module": (["show", "--module", "wordz"], "words"),
    "a graph": (["show", "--graph", "trian", "--module", "words"], "train"),
    "a graph to export": (["export", "--to", "pt2", "--graph", "evl", "-o", "x.pt2"], "eval"),
    "a device profile": (["plan", "--device", "h10"], "h100"),
    "a set of operators": (["ops", "--set", "cor"], "core"),
    "a parameter": (
        ["plan", "--devices-per-node", "2", "--tensor", "2", "--tensor-rule", "head.wieght=0"],
        "head.weight",
    ),
    "a frozen parameter": (["plan", "--set", "frozen=words.wieght"], "words.weight"),
    "a parameter group": (["plan", "--set", "lr.group=1"], "group0"),
}


@pytest.mark.parametrize(("words", "meant"), OF_A_PACKAGE.values(), ids=OF_A_PACKAGE.keys())
def test_a_name_of_a_package_gets_a_suggestion(
    words: list[str],
    meant: str,
    tiny: Package,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([words[0], str(tiny.path), *words[1:]]) == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_a_line_of_a_store_gets_a_suggestion(
    tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "store")
    assert cli.run(["push", str(tiny.path), store, "--line", "ranking"]) == 0
    capsys.readouterr()
    for words in (["releases", store, "--line", "rankin"], ["pull", f"{store}#rankin", "-o", "x"]):
        assert cli.run(words) == 2
        assert "Did you mean ranking?" in capsys.readouterr().err


def with_names(**options: object) -> Callable[[], trainload.Job]:
    def make() -> trainload.Job:
        batch = {"tokens": torch.from_numpy(token_rows(4))}
        return trainload.Job(
            Tiny(),
            batch,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=loss,
            **options,  # type: ignore[arg-type]  # fields by name
        )

    return make


JOBS = {
    "dynamic": with_names(dynamic={"token": {1: None}}),
    "shared": with_names(shared=["token"]),
    "predict_inputs": with_names(
        predict=lambda model, batch: model(batch["tokens"]), predict_inputs=["token"]
    ),
}


@pytest.mark.parametrize("make", JOBS.values(), ids=JOBS.keys())
def test_a_name_in_a_job_gets_a_suggestion(
    make: Callable[[], trainload.Job], tmp_path: Path
) -> None:
    with pytest.raises(TrainloadError, match="Did you mean tokens"):
        trainload.freeze(make(), tmp_path / "x.tl")


def test_a_function_of_a_file_gets_a_suggestion(
    tiny: Package,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.py").write_text("def rows():\n    pass\n\n\ndef fuse():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    for words in (
        ["launch", str(tiny.path), "--data", "python:mine.py:row", "--backend", "local"],
        ["transform", str(tiny.path), "--pass", "mine.py:fuze", "-o", "x.tl"],
        ["freeze", "mine.py:row", "-o", "x.tl"],
    ):
        assert cli.run(words) == 2
        assert "Did you mean" in capsys.readouterr().err


def test_choices_of_every_command_suggest() -> None:
    """Click's own type does not; prompts, which ask again, may use it."""
    plain = [
        f"{name} {param.name}"
        for name, command in every_command()
        for param in command.params
        if isinstance(param.type, click.Choice) and not isinstance(param.type, OneOf)
    ]
    assert plain == []


def test_one_module_compares_names() -> None:
    """Every other use of difflib compares sequences."""
    users = {
        path.name
        for path in (*stage_files(), *face_files())
        if re.search(r"get_close_matches", path.read_text())
    }
    assert users == {"suggestions.py"}


def test_every_error_about_an_unknown_name_suggests_one() -> None:
    """An error that lists the names that are known, and the one that it got, has a hint."""
    lacking = []
    for path in (*stage_files(), *face_files()):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            problem = ast.unparse(call.args[0])
            has = {word.arg for word in call.keywords}
            lists_names = any(
                word.arg == "expected" and ".join(" in ast.unparse(word.value)
                for word in call.keywords
            )
            about_names = re.search(
                r"(there is|has) no such (?!interval)|unknown (key|set|export)", problem
            )
            if about_names and lists_names and "hint" not in has:
                lacking.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert lacking == []


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("luanch", ["launch", "lineage"], "launch"),
        ("ZERO3", ["zero1", "zero3"], "zero3"),
        ("lr_rate", ["lr", "loss"], "lr"),
        ("strat", ["single", "strategy"], "strategy"),
        ("quux", ["launch", "plan"], None),
        ("x", ["xylophone"], None),
        ("anything", [], None),
    ],
)
def test_the_nearest_name(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected
