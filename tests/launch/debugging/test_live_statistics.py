"""Statistics that a run samples while it trains, over all ranks of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.debugging.planted_faults import (
    ROWS,
    WIDTH,
    freeze,
    linear,
    plain_batch,
    root_loss,
    save,
)
from tests.launch.debugging.wrong_devices import FAULT, train_with_a_flipped_bit
from tests.launch.graph_jobs import frozen, write_digits
from tests.laws.runs import Run, ranks

import trainload
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.sinks.sink import numbers_of
from trainload.packaging.package import Package
from trainload.report.runs.history import read_history

STEPS = 4
EVERY = 2
PLANS = {
    "zero3": {"strategy": "zero3"},
    "a pipeline": {"pipeline_ranks": 2},
}
MORE_PLANS = {
    "zero0": {"strategy": "zero0"},
    "zero1": {"strategy": "zero1"},
    "tensor parallel": {"tensor_ranks": 2},
    "accumulation": {"strategy": "zero2", "accumulate": 2},
}


def samples(run: Path) -> dict[int, dict[tuple[str, str], float]]:
    """Return step -> (module or parameter, measure) -> value, of a run's samples."""
    return {
        event.data["step"]: {
            (name.rpartition("/")[0], name.rpartition("/")[2]): value
            for name, value in numbers_of(event).items()
        }
        for event in read_events(run)
        if event.kind == "statistics"
    }


def launched(package: Package, data: Path, folder: Path, **options: Any) -> Path:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    settings = {"compile": False, "backend": "local", "steps": STEPS, **options}
    trainload.launch(package, plan, data, run_dir=folder, **settings)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, gpt: Package, gpt_data: Path) -> Path:
    """A run of one process without statistics."""
    return launched(gpt, gpt_data, tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, gpt: Package, gpt_data: Path) -> Path:
    """A run of one process with statistics."""
    return launched(gpt, gpt_data, tmp_path_factory.mktemp("single") / "run", statistics=EVERY)


def test_a_sample_is_taken_every_n_steps(single: Path) -> None:
    assert list(samples(single)) == [2, 4]


def test_a_report_keeps_the_last_sample(single: Path) -> None:
    (sample,) = read_history(read_events(single)).of("statistics")
    assert sample.data["step"] == STEPS


def test_a_run_has_the_same_losses_with_and_without_statistics(single: Path, plain: Path) -> None:
    assert losses(read_events(single)) == losses(read_events(plain))


def test_samples_are_the_statistics_of_the_step_computed_again(single: Path) -> None:
    statistics = trainload.debug(single, step=EVERY, statistics=True).statistics
    assert statistics is not None
    sample = samples(single)[EVERY]
    for each in statistics.parameters:
        name = f"statistics/{each.parameter}"
        assert sample[name, "norm"] == pytest.approx(each.norm, rel=1e-3)
        assert sample[name, "gradient"] == pytest.approx(each.gradient, rel=1e-3, abs=1e-9)
        assert sample[name, "update"] == pytest.approx(each.update, rel=1e-3, abs=1e-9)
    for activation in statistics.activations:
        if activation.module and not activation.operator:
            name = f"statistics/{activation.module}"
            assert sample[name, "rms"] == pytest.approx(activation.rms, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in PLANS.items()),
        *(
            pytest.param(options, id=name, marks=pytest.mark.slow)
            for name, options in MORE_PLANS.items()
        ),
    ],
)
def test_every_plan_has_the_statistics_of_one_process(
    gpt: Package, gpt_data: Path, single: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(1, 2), **options)
    run = Run(tmp_path / "run", gpt, plan, gpt_data, {"steps": STEPS, "statistics": EVERY})
    with ranks(2, [run], tmp_path) as processes:
        for process in processes:
            process.join(300)
    expected, found = samples(single), samples(run.run_dir)
    assert found.keys() == expected.keys()
    for step, sample in found.items():
        assert sample.keys() == expected[step].keys()
        assert sample == pytest.approx(expected[step], rel=2e-2, abs=1e-6)


@pytest.mark.slow
def test_a_compiled_run_has_the_same_losses_with_and_without_statistics(
    gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    found = [
        losses(
            read_events(
                launched(gpt, gpt_data, tmp_path / name, compile=True, statistics=statistics)
            )
        )
        for name, statistics in (("with", EVERY), ("without", None))
    ]
    assert found[0] == found[1]


def test_a_run_warns_that_copies_of_a_parameter_differ(tmp_path: Path) -> None:
    package = freeze(tmp_path, linear(), root_loss, plain_batch(), steps=FAULT + 1)
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    data = save(tmp_path / "rows.npz", x=rows)
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero0")
    run = Run(tmp_path / "run", package, plan, data, {"statistics": 1})
    with ranks(2, [run], tmp_path, act=train_with_a_flipped_bit) as processes:
        for process in processes:
            process.join(300)
    warnings = [e.data for e in read_events(run.run_dir) if e.kind == "warning"]
    assert warnings[0]["step"] == FAULT
    assert "ranks 0 and ranks 1 hold unequal copies of weight" in warnings[0]["message"]


def test_equal_copies_are_no_warning(single: Path) -> None:
    assert not [event for event in read_events(single) if event.kind == "warning"]


@pytest.fixture(scope="module")
def adversarial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a GAN, whose graphs train in turns, with statistics."""
    package = frozen(tmp_path_factory, "gan")
    folder = tmp_path_factory.mktemp("gan")
    names = set(package.manifest.data_inputs())
    return launched(
        package, write_digits(folder / "rows.npz", names), folder / "run", statistics=EVERY
    )


def test_each_graph_of_a_job_has_a_sample_of_its_own_parameters(adversarial: Path) -> None:
    sampled = {
        event.data["graph"]: {each["parameter"] for each in event.data["parameters"]}
        for event in read_events(adversarial)
        if event.kind == "statistics"
    }
    recipe = trainload.open(read_spec(adversarial).package).recipe
    assert sampled.keys() == {turn.graph for turn in recipe.turns}
    assert not set.intersection(*sampled.values())


def test_updates_of_several_graphs_are_those_of_the_step_computed_again(adversarial: Path) -> None:
    statistics = trainload.debug(adversarial, step=EVERY, statistics=True).statistics
    assert statistics is not None
    sampled = {
        each["parameter"]: each["update"]
        for event in read_events(adversarial)
        if event.kind == "statistics" and event.data["step"] == EVERY
        for each in event.data["parameters"]
    }
    again = {each.parameter: each.update for each in statistics.parameters}
    assert sampled == pytest.approx(again, rel=1e-3, abs=1e-9)
