"""A run that meets a value that is not finite names its operator, line and rows by itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.debugging.planted_faults import (
    LAYERS,
    ROWS,
    WIDTH,
    Chain,
    chain_loss,
    freeze,
    plain_batch,
    products_loss,
    save,
    several,
)
from tests.laws.runs import Run, ranks

import trainload
from trainload.core.errors import DivergedError, RequestError
from trainload.launching.data.sampler import rows
from trainload.launching.run.journal import read_events
from trainload.launching.worker import divergence
from trainload.packaging.package import Package

FAILING = 3
"""Number of the step, from 1, with the row that is divided by zero."""
STEPS = 4
SEED = 3
PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"strategy": "zero0"},
    "zero3": {"strategy": "zero3"},
    "accumulation": {"strategy": "zero1", "accumulate": 2},
    "a pipeline": {"pipeline_ranks": 2},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    batch = plain_batch() | {"layer": torch.full((ROWS,), LAYERS)}
    return freeze(tmp_path_factory.mktemp("package"), Chain(), chain_loss, batch, steps=STEPS)


@pytest.fixture(scope="module")
def bad_row() -> int:
    return int(rows(SEED, ROWS * STEPS, ROWS * (FAILING - 1), ROWS)[-1])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, bad_row: int) -> Path:
    draw = np.random.default_rng(0)
    layer = np.full(ROWS * STEPS, LAYERS)
    layer[bad_row] = 2
    x = draw.standard_normal((ROWS * STEPS, WIDTH), dtype=np.float32)
    return save(tmp_path_factory.mktemp("data") / "rows.npz", x=x, layer=layer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, package: Package, data: Path) -> Path:
    """A run of one worker that has failed, with a checkpoint before the last step it completed."""
    folder = tmp_path_factory.mktemp("run") / "run"
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with pytest.raises(DivergedError):
        trainload.launch(
            package, plan, data, run_dir=folder, compile=False, backend="local", checkpoint_every=1
        )
    return folder


def test_the_error_names_operator_line_and_row(run: Path, data: Path, bad_row: int) -> None:
    (failed,) = [event for event in read_events(run) if event.kind == "failed"]
    message = failed.data["message"]
    assert message.startswith(f"step {FAILING}: the loss is nan")
    assert re.search(
        r"aten\.div\.Tensor makes an infinity in the forward of layers\.2,"
        r" at .*planted_faults\.py:\d+: divided: Tensor = .*,"
        rf" row {bad_row} of {re.escape(str(data))}\.",
        message,
    )


def test_the_journal_has_the_finding(run: Path, bad_row: int) -> None:
    (finding,) = [event.data for event in read_events(run) if event.kind == "finding"]
    assert (finding["step"], finding["module"]) == (FAILING - 1, "layers.2")
    assert list(finding["rows"]) == [bad_row]


def test_a_search_that_fails_does_not_hide_the_loss(
    package: Package, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(divergence, "uncompiled_build", no_memory)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    expected = (
        rf"step {FAILING}: the loss is nan .* The operator could not be found: not enough memory"
    )
    with pytest.raises(DivergedError, match=expected):
        trainload.launch(
            package, plan, data, run_dir=tmp_path / "run", compile=False, backend="local"
        )


def test_the_step_is_computed_again_from_the_checkpoint_before_it(run: Path, bad_row: int) -> None:
    diagnosis = trainload.debug(run)
    assert (diagnosis.step, diagnosis.began) == (FAILING, FAILING - 1)
    assert diagnosis.finding is not None
    assert diagnosis.finding.sighting.rows == (bad_row,)


def test_an_earlier_step_has_the_loss_of_the_run(run: Path) -> None:
    diagnosis = trainload.debug(run, step=2)
    (loss,) = [
        event.data["loss"]
        for event in read_events(run)
        if event.kind == "step" and event.data["step"] == 1
    ]
    assert (diagnosis.loss, diagnosis.finding) == (loss, None)


def test_a_step_that_the_run_does_not_have_is_rejected(run: Path) -> None:
    with pytest.raises(RequestError, match=rf"step: .* \(expected 1 to {STEPS}, got 99\)"):
        trainload.debug(run, step=99)


@pytest.mark.matrix("zero3")
@pytest.mark.parametrize("name", PLANS)
def test_ranks_find_the_row_that_one_of_them_has(
    package: Package, data: Path, bad_row: int, tmp_path: Path, name: str
) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), **PLANS[name])
    with ranks(2, [Run(tmp_path / "run", package, plan, data, {})], tmp_path) as started:
        for process in started:
            process.join(300)
    (finding,) = [event.data for event in read_events(tmp_path / "run") if event.kind == "finding"]
    assert (finding["operator"], finding["module"]) == ("aten.div.Tensor", "layers.2")
    assert list(finding["rows"]) == [bad_row]
    assert set(finding["parameters"]) == {entry.name for entry in package.parameters}


@pytest.mark.matrix("accumulation")
@pytest.mark.parametrize("name", PLANS)
def test_ranks_bisect_the_rows_of_a_value_without_a_dim_of_rows(tmp_path: Path, name: str) -> None:
    package = freeze(tmp_path, several(), products_loss, plain_batch(), steps=1)
    x = np.ones((ROWS, WIDTH), np.float32)
    bad = int(rows(SEED, ROWS, 0, ROWS)[-1])
    x[bad] = 1e25
    path = save(tmp_path / "rows.npz", x=x)
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), **PLANS[name])
    with ranks(2, [Run(tmp_path / "run", package, plan, path, {})], tmp_path) as started:
        for process in started:
            process.join(300)
    (finding,) = [event.data for event in read_events(tmp_path / "run") if event.kind == "finding"]
    assert finding["operator"] == "aten.mm.default"
    assert list(finding["rows"]) == [bad]
