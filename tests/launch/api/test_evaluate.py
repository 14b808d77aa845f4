"""Evaluation of a package without training: the results equal those of a run's own evaluation.

This holds for all rows and for each named part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainload
from trainload.core.errors import DataError, RequestError
from trainload.launching.run.journal import Event
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

pytestmark = pytest.mark.slow

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def plan(gpt: Package) -> Plan:
    return trainload.plan(gpt, trainload.Cluster(devices_per_node=1), "single")


def evaluated(
    package: Package, plan: Plan, data: Path, **options: Any
) -> trainload.EvaluationResult:
    return trainload.evaluate(package, plan, data, backend="local", **{"compile": False, **options})


@pytest.fixture(scope="module")
def run(
    gpt: Package,
    plan: Plan,
    gpt_data: Path,
    gpt_held_out: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Run with evaluations before its first and after its last step, and an output package."""
    folder = tmp_path_factory.mktemp("run")
    return trainload.launch(
        gpt,
        plan,
        gpt_data,
        run_dir=folder / "run",
        eval_data=gpt_held_out,
        steps=2,
        output=folder / "out.tl",
        backend="local",
        compile=False,
    )


def test_a_package_is_evaluated_as_a_run_evaluates_it_before_its_first_step(
    gpt: Package, plan: Plan, gpt_held_out: Path, run: Any
) -> None:
    found, first = evaluated(gpt, plan, gpt_held_out), run.evaluations[0]
    assert (found.loss, found.metrics, found.rows) == (first["loss"], first["metrics"], 21)


def test_what_a_run_has_written_is_evaluated_as_the_run_did_after_its_last_step(
    plan: Plan, gpt_held_out: Path, run: Any
) -> None:
    trained = trainload.open(run.output)
    found = evaluated(
        trained,
        trainload.plan(trained, trainload.Cluster(devices_per_node=1), "single"),
        gpt_held_out,
    )
    assert (found.loss, found.metrics) == (
        run.evaluations[-1]["loss"],
        run.evaluations[-1]["metrics"],
    )


def test_nothing_is_left_but_what_is_asked_for(
    gpt: Package, plan: Plan, gpt_held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    evaluated(gpt, plan, gpt_held_out)
    assert list(tmp_path.glob("trainload-evaluate-*")) == []
    evaluated(gpt, plan, gpt_held_out, run_dir=tmp_path / "kept")
    assert (tmp_path / "kept" / "run.json").is_file()


def test_after_a_training_under_the_same_plan_nothing_is_compiled_again(
    gpt: Package, plan: Plan, gpt_data: Path, gpt_held_out: Path, tmp_path: Path, cache_dir: Path
) -> None:
    trainload.launch(
        gpt,
        plan,
        gpt_data,
        run_dir=tmp_path / "run",
        eval_data=gpt_held_out,
        steps=1,
        backend="local",
    )
    before = {path.name for path in (cache_dir / "compiled").iterdir()}
    evaluated(gpt, plan, gpt_held_out, compile=True)
    assert {path.name for path in (cache_dir / "compiled").iterdir()} == before


def test_a_cluster_needs_a_folder_that_its_nodes_share(
    gpt: Package, plan: Plan, gpt_held_out: Path
) -> None:
    with pytest.raises(RequestError, match="a cluster needs a run folder on shared storage"):
        trainload.evaluate(gpt, plan, gpt_held_out, address="127.0.0.1:1")


def test_a_run_of_no_steps_is_no_run(
    gpt: Package, plan: Plan, gpt_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        RequestError, match=r"steps: is out of range \(expected greater than or equal to 1, got 0"
    ):
        trainload.launch(
            gpt, plan, gpt_data, run_dir=tmp_path / "run", steps=0, backend="local", compile=False
        )
    assert not (tmp_path / "run").exists()


def parts(folder: Path, rows: Path, *named: tuple[str, int, int]) -> Path:
    """Write a mixture whose parts are slices of a file's rows."""
    arrays = np.load(rows)
    entries = []
    for name, start, stop in named:
        np.savez(
            folder / f"{start}.npz",
            **{column: arrays[column][start:stop] for column in arrays.files},
        )
        entries.append({"data": f"{start}.npz", **({"name": name} if name else {})})
    path = folder / "mixture.json"
    path.write_text(json.dumps({"parts": entries}))
    return path


def test_each_part_that_has_a_name_is_told(
    gpt: Package, plan: Plan, gpt_held_out: Path, tmp_path: Path
) -> None:
    found = evaluated(
        gpt, plan, parts(tmp_path, gpt_held_out, ("a", 0, 8), ("", 8, 12), ("b=2", 12, 21))
    )
    assert {name: part["rows"] for name, part in found.parts.items()} == {"a": 8, "b=2": 9}
    assert found.rows == 21


def test_a_part_is_evaluated_to_what_its_rows_alone_are(
    gpt: Package, plan: Plan, gpt_held_out: Path, tmp_path: Path
) -> None:
    found = evaluated(gpt, plan, parts(tmp_path, gpt_held_out, ("a", 0, 8), ("b", 8, 21)))
    alone = evaluated(gpt, plan, tmp_path / "8.npz")
    assert (found.parts["b"]["loss"], found.parts["b"]["metrics"]) == (alone.loss, alone.metrics)


def test_all_parts_together_are_evaluated_to_what_one_file_of_their_rows_is(
    gpt: Package, plan: Plan, gpt_held_out: Path, tmp_path: Path
) -> None:
    found = evaluated(gpt, plan, parts(tmp_path, gpt_held_out, ("a", 0, 8), ("b", 8, 21)))
    assert found.loss == pytest.approx(evaluated(gpt, plan, gpt_held_out).loss, rel=TOLERANCE)


def test_the_journal_tells_of_parts_only_where_they_have_names(
    gpt: Package, plan: Plan, gpt_data: Path, gpt_held_out: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    for number, held_out in enumerate((gpt_held_out, parts(tmp_path, gpt_held_out, ("a", 0, 21)))):
        trainload.launch(
            gpt,
            plan,
            gpt_data,
            run_dir=tmp_path / f"run-{number}",
            eval_data=held_out,
            steps=1,
            backend="local",
            compile=False,
            on_event=events.append,
        )
    assert ["parts" in event.data for event in events if event.kind == "eval"] == [
        False,
        False,
        True,
        True,
    ]


def test_two_parts_of_one_name_are_refused(
    gpt: Package, plan: Plan, gpt_held_out: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="two parts of a mixture have the same name"):
        evaluated(gpt, plan, parts(tmp_path, gpt_held_out, ("a", 0, 8), ("a", 8, 21)))
