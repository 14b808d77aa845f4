"""Conflicting options of launch, resume and evaluate; arguments of a supervised driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import trainload
from trainload.cli import main as cli
from trainload.cli.commands import run_handover, runs
from trainload.core.errors import ClusterError, RequestError
from trainload.launching.settings.parse import KEYS
from trainload.launching.settings.run_settings import EvaluationSettings
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]
LAUNCH = ["launch", "none.tl", "--data", "d.parquet"]
EVALUATE = ["evaluate", "none.tl", "--data", "d.parquet"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [*LAUNCH, "--backend", "local", "--address", "http://h:1", "--detach"],
            "--detach requires Ray",
        ),
        ([*LAUNCH, "--backend", "local", "--address", "h:1"], "--address requires Ray"),
        (
            [*LAUNCH, "--backend", "torchrun", "--run-dir", "r", "--address", "h:1"],
            "--address requires Ray",
        ),
        ([*EVALUATE, "--backend", "local", "--address", "h:1"], "--address requires Ray"),
        (["resume", ".", "--backend", "local", "--address", "h:1"], "--address requires Ray"),
        ([*LAUNCH, "--plan", "p.json", "--nodes", "2"], "--plan sets the number of nodes"),
        ([*EVALUATE, "--plan", "p.json", "--nodes", "2"], "--plan sets the number of nodes"),
        ([*EVALUATE, "--set", "keep=2"], "--set keep: an evaluation has no such setting"),
        ([*EVALUATE, "--set", "lr=0.1"], "--set lr: an evaluation has no such setting"),
        (
            [*EVALUATE, "--set", "adapters.rank=2", "--set", "adapters.layers=a"],
            "--set adapters: an evaluation has no such setting",
        ),
        (
            [*EVALUATE, "--batches", "2", "--set", "eval_batches=3"],
            "--batches and --set eval_batches have different values",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: list[str], said: str, capsys: Capture) -> None:
    assert cli.run(arguments) == 2
    assert said in capsys.readouterr().err


VALUES = {"deterministic": ("false", False)}
"""Setting -> a text that is one of its values, and that value, if it is no number."""


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in EvaluationSettings.model_fields
        if name in KEYS and not KEYS[name].info.option
    ],
)
def test_a_setting_of_an_evaluation_reaches_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {}
    monkeypatch.setattr("trainload.cli.commands.shared.open_to_run", lambda package: NONE)
    monkeypatch.setattr(
        "trainload.launching.settings.overrides.Overrides.apply", lambda *given: NONE
    )
    monkeypatch.setattr(runs, "make_plan", lambda *given, **options: NONE)
    monkeypatch.setattr(runs, "show_record", lambda *given: None)
    monkeypatch.setattr(
        "trainload.launching.api.evaluate.evaluate", lambda *given, **options: heard.update(options)
    )
    text, value = VALUES.get(name, ("7", 7))
    assert cli.run([*EVALUATE, "--set", f"{name}={text}"]) == 0
    assert heard[name] == value


NONE: Any = None
"""Placeholder for arguments and results that a test does not use."""


@pytest.mark.parametrize("backend", ["local", "torchrun"])
def test_so_it_is_from_python(backend: Any, tmp_path: Path) -> None:
    for ask in (trainload.launch, trainload.dry_run):
        with pytest.raises(
            RequestError, match=f"an address requires the Ray backend.*backend {backend}"
        ):
            ask(NONE, NONE, NONE, run_dir=tmp_path / "run", backend=backend, address="h:1")
    with pytest.raises(RequestError, match="an address requires the Ray backend"):
        trainload.resume(tmp_path / "run", backend=backend, address="h:1")


def test_a_backend_that_there_is_not_is_refused(tmp_path: Path) -> None:
    other: Any = "slurm"
    with pytest.raises(ClusterError, match=r"no such backend.*ray or local or torchrun.*slurm"):
        trainload.launch(NONE, NONE, NONE, run_dir=tmp_path / "run", backend=other)
    with pytest.raises(ClusterError, match="no such backend"):
        trainload.resume(tmp_path / "run", backend=other)


def test_a_plan_is_the_largest_of_an_elastic_run(capsys: Capture) -> None:
    assert cli.run([*LAUNCH, "--plan", "p.json", "--nodes", "1:2"]) == 2
    assert "none.tl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], []),
        (["--workers", "3", "--strategy", "zero1"], ["--workers", "3", "--strategy", "zero1"]),
        (["--plan", "p.json"], ["--plan", "HERE/p.json"]),
    ],
)
def test_a_run_that_is_resumed_otherwise_on_a_cluster_is_kept(
    options: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers: list[Sequence[str]] = []

    def keep(arguments: Sequence[str], *others: object, as_json: bool) -> int:
        drivers.append(arguments)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_handover, "keep", keep)
    assert cli.run(["resume", ".", "--address", "h:1", *options]) == 0
    assert drivers == [
        [
            "resume",
            str(tmp_path),
            "--address",
            "h:1",
            *(word.replace("HERE", str(tmp_path)) for word in told),
        ]
    ]


@pytest.mark.parametrize(
    ("verb", "options", "said"),
    [
        (trainload.launch, {"step": 1}, "step: there is no such option.*Did you mean steps"),
        (
            trainload.launch,
            {"set": {"lr": 1e-9}},
            "set: there is no such option.*changes of the training settings in `overrides`",
        ),
        (trainload.launch, {"checkpoint_every": 0}, "checkpoint_every: is out of range.*got 0"),
        (trainload.launch, {"compile": None}, "compile: has the wrong type"),
        (trainload.launch, {"steps": 2.5}, "steps: is out of range.*got 2.5"),
        (trainload.dry_run, {"nonsense": 1}, "nonsense: there is no such option"),
        (trainload.evaluate, {"steps": 5}, "steps: there is no such option"),
    ],
)
def test_an_option_of_python_s_that_would_be_passed_over_is_refused(
    verb: Any, options: dict[str, Any], said: str, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    with pytest.raises(RequestError, match=said):
        verb(tiny, plan, tiny_data, run_dir=tmp_path / "run", backend="local", **options)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_folder_is_refused(tiny: Package, tiny_data: Path) -> None:
    with pytest.raises(RequestError, match="run_dir: is missing"):
        trainload.launch(
            tiny, trainload.plan(tiny, trainload.Cluster(), "single"), tiny_data, backend="local"
        )  # type: ignore[call-arg]
