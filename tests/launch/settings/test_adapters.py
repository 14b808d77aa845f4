"""Low-rank adapters of a frozen package train like adapters added by hand.

Everything else stays unchanged.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.golden.goldens import goldens
from tests.launch import graph_jobs
from tests.launch.optimizer_jobs import STEPS, adam, eager, make_job
from tests.launch.settings.adapters_by_hand import (
    ADAPTERS,
    LAYERS,
    WITH_NORM,
    Regions,
    adam_of_trained,
    by_hand,
)
from tests.laws.runs import TOLERANCE, Run, curve, difference, train
from tests.selection import selected
from torch import Tensor

import trainload
from trainload.cli import main as cli
from trainload.core.errors import JobError
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.settings.adapters import Adapters
from trainload.packaging.package import Package

TWO = trainload.Cluster(devices_per_node=2)
Capture = pytest.CaptureFixture[str]


def launched(
    package: Package,
    rows: Path,
    run_dir: Path,
    adapters: Adapters,
    strategy: Any = "single",
    **options: Any,
) -> list[float]:
    overrides = trainload.Overrides(adapters=adapters)
    plan = trainload.plan(overrides.apply(package), trainload.Cluster(), strategy)
    given: dict[str, Any] = {
        "compile": False,
        "backend": "local",
        "overrides": overrides,
        **options,
    }
    trainload.launch(
        package, plan, rows, run_dir=run_dir, output=run_dir.with_suffix(".tl"), **given
    )
    return curve(run_dir)


def weights(package: Package) -> dict[str, Tensor]:
    return {
        spec.name: package.weights.tensor(spec.name)
        for spec in package.parameters
        if spec.alias_of is None
    }


@pytest.fixture(scope="module")
def alone(package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on one worker."""
    folder = tmp_path_factory.mktemp("alone")
    launched(package, rows, folder / "run", ADAPTERS)
    return folder / "run"


def test_a_run_has_the_losses_and_adapters_of_ones_made_by_hand(
    package: Package, alone: Path
) -> None:
    plain = eager(by_hand(make_job(adam_of_trained), package, ADAPTERS))
    assert difference(plain.losses, curve(alone)) <= TOLERANCE
    found = load_file(alone / "adapters.safetensors")
    assert len(found) == 2 * len(LAYERS)
    for name in ("second", "third", "last"):
        layer: Any = plain.model.get_submodule(name)
        torch.testing.assert_close(
            found[f"base_model.model.{name}.lora_A.weight"],
            layer.down.detach(),
            rtol=1e-4,
            atol=1e-6,
        )
        torch.testing.assert_close(
            found[f"base_model.model.{name}.lora_B.weight"], layer.up.detach(), rtol=1e-4, atol=1e-6
        )


def test_without_adapters_the_losses_are_others(package: Package, alone: Path, rows: Path) -> None:
    assert difference(eager(make_job(adam)).losses, curve(alone)) > 1e-3


def test_the_trained_package_is_the_frozen_job_s_with_the_adapters_merged(
    package: Package, alone: Path
) -> None:
    plain = eager(by_hand(make_job(adam_of_trained), package, ADAPTERS))
    after = trainload.open(alone.with_suffix(".tl"))
    assert after.manifest.program_digest == package.manifest.program_digest
    assert after.manifest.parent == package.digest
    before, now = weights(package), weights(after)
    assert {name for name in before if not torch.equal(before[name], now[name])} == set(LAYERS)
    for name in LAYERS:
        layer: Any = plain.model.get_submodule(name.removesuffix(".weight"))
        torch.testing.assert_close(now[name], layer.merged(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_is_trained_beside_the_adapters_is_trained_as_it_was(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    plain = eager(by_hand(make_job(adam_of_trained), package, WITH_NORM))
    assert (
        difference(plain.losses, launched(package, rows, tmp_path / "run", WITH_NORM)) <= TOLERANCE
    )
    before, now = weights(package), weights(trainload.open(tmp_path / "run.tl"))
    assert {name for name in before if not torch.equal(before[name], now[name])} == {
        *LAYERS,
        "norm.weight",
        "norm.bias",
    }


@pytest.mark.slow
def test_compiled_it_is_the_same_run(
    package: Package, alone: Path, rows: Path, tmp_path: Path
) -> None:
    assert (
        difference(curve(alone), launched(package, rows, tmp_path / "run", ADAPTERS, compile=True))
        <= TOLERANCE
    )


@pytest.fixture(scope="module")
def pair(
    package: Package,
    rows: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """Folder of runs on two workers."""
    folder = tmp_path_factory.mktemp("pair")
    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    axes: dict[str, Any] = {"tensor": {"tensor_ranks": 2}, "pipeline": {"pipeline_ranks": 2}}
    asked = [
        name for name in ("zero1", "zero2", "zero3", *axes) if name in selected(request, "name")
    ]
    plans = {
        name: trainload.plan(changed, TWO, **axes.get(name, {"strategy": name})) for name in asked
    }
    overrides = {"overrides": {"adapters": ADAPTERS.model_dump(mode="json")}}
    train(
        2,
        [
            Run(
                folder / name,
                package,
                plan,
                rows,
                {**overrides, "output": str(folder / f"{name}.tl")},
            )
            for name, plan in plans.items()
        ],
        folder,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "tensor", "pipeline"])
def test_two_workers_train_the_same_adapters(pair: Path, alone: Path, name: str) -> None:
    assert difference(curve(alone), curve(pair / name)) <= TOLERANCE
    found, expected = (
        weights(trainload.open(pair / f"{name}.tl")),
        weights(trainload.open(alone.with_suffix(".tl"))),
    )
    for parameter in LAYERS:
        torch.testing.assert_close(found[parameter], expected[parameter], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_holds_state_for_what_is_trained_alone(alone: Path) -> None:
    from trainload.launching.checkpoints.checkpoint_place import place_of
    from trainload.launching.checkpoints.reader import Checkpoint, usable_checkpoint

    path = usable_checkpoint(place_of(alone)).path
    assert path is not None
    index = Checkpoint.open(path).index
    moments = {
        slot.parameter
        for bucket in index.buckets
        if len(index.entries[bucket.name]) > 1
        for slot in bucket.slots
    }
    assert moments == {
        each
        for name in LAYERS
        for each in (name.replace(".w", ".lora_A.w"), name.replace(".w", ".lora_B.w"))
    }


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_bits(
    package: Package, alone: Path, rows: Path, tmp_path: Path
) -> None:
    launched(package, rows, tmp_path / "run", ADAPTERS, steps=STEPS, checkpoint_every=5)
    for later in (tmp_path / "run" / "checkpoints").glob("step-*12"):
        shutil.rmtree(later)
    (tmp_path / "run.tl").rename(tmp_path / "before.tl")
    trainload.resume(tmp_path / "run", backend="local")
    assert curve(tmp_path / "run") == curve(alone)
    assert (
        trainload.open(tmp_path / "run.tl").digest == trainload.open(tmp_path / "before.tl").digest
    )


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Package of the job with autocast and a checkpoint, whose third layer is frozen."""
    job = make_job(adam_of_trained, Regions)
    job.model.get_submodule("third").requires_grad_(False)
    return trainload.freeze(
        dataclasses.replace(job, optimizer=adam_of_trained),
        tmp_path_factory.mktemp("held") / "job.tl",
    )


@pytest.mark.slow
def test_layers_in_regions_get_adapters(held: Package, rows: Path, tmp_path: Path) -> None:
    adapters = Adapters(rank=2, layers=("second.weight", "last.weight"))
    plain = eager(by_hand(make_job(adam_of_trained, Regions), held, adapters))
    assert difference(plain.losses, launched(held, rows, tmp_path / "run", adapters)) <= TOLERANCE


@pytest.mark.slow
def test_an_update_of_whole_parameters_is_none_for_adapters(tmp_path: Path) -> None:
    # a package with two graphs, one of which Muon updates
    golden = next(each for each in goldens() if each.name == "turns")
    package = trainload.open(golden.package)
    with pytest.raises(
        JobError, match=r"cannot be updated by Muon \+ SGD .*whole parameters of shape \(6, 4\)"
    ):
        trainload.Overrides(adapters=Adapters(rank=2, layers=("maker.weight",))).apply(package)
    adapters = Adapters(rank=1, layers=("judge.0.weight",), also=("maker.*",))
    assert launched(package, golden.data, tmp_path / "run", adapters, steps=2)
    before, now = weights(package), weights(trainload.open(tmp_path / "run.tl"))
    assert {name for name in before if not torch.equal(before[name], now[name])} == {
        "judge.0.weight",
        "maker.weight",
        "maker.bias",
    }


@pytest.mark.slow
def test_a_layer_that_was_frozen_with_the_job_can_have_an_adapter(
    held: Package, rows: Path, tmp_path: Path
) -> None:
    adapters = Adapters(rank=2, layers=("third.weight",))
    plain = eager(by_hand(make_job(adam_of_trained, Regions), held, adapters))
    assert difference(plain.losses, launched(held, rows, tmp_path / "run", adapters)) <= TOLERANCE


@pytest.mark.slow
def test_several_graphs_train_the_adapters_that_they_reach(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package = graph_jobs.frozen(tmp_path_factory, "tasks")
    adapters = Adapters(rank=2, layers=("torso.*.weight", "classes.weight"))
    plain = graph_jobs.eager(by_hand(graph_jobs.tasks(), package, adapters))
    data = graph_jobs.write_digits(tmp_path / "digits.npz", {"image", "label"})
    launched(package, data, tmp_path / "run", adapters)
    for event, wanted in zip(
        (e for e in read_events(tmp_path / "run") if e.kind == "step"), plain.losses, strict=True
    ):
        assert event.data["loss"] == pytest.approx(wanted["classify"], rel=TOLERANCE)
        assert event.data["metrics"]["rebuild.loss"] == pytest.approx(
            wanted["rebuild"], rel=TOLERANCE
        )


@pytest.mark.slow
def test_every_variant_has_the_adapters_that_it_reaches(tmp_path: Path) -> None:
    golden = next(each for each in goldens() if each.name == "variants")
    package = trainload.open(golden.package)
    found = launched(
        package,
        golden.data,
        tmp_path / "run",
        Adapters(rank=2, layers=("layer.weight", "hint.weight")),
        steps=2,
    )
    changed = trainload.Overrides(
        adapters=Adapters(rank=2, layers=("layer.weight", "hint.weight"))
    ).apply(package)
    reached = {
        name: entry.reached
        for name, entry in changed.manifest.graphs.items()
        if name.startswith("train")
    }
    assert reached == {
        "train": ("layer.lora_A.weight", "layer.lora_B.weight"),
        "train-hinted": None,
    }
    assert len(found) == 2
    before, now = weights(package), weights(trainload.open(tmp_path / "run.tl"))
    assert torch.equal(before["layer.bias"], now["layer.bias"]) and not torch.equal(
        before["layer.weight"], now["layer.weight"]
    )


def commanded(package: Package, rows: Path, *settings: str) -> list[str]:
    return [
        "launch",
        str(package.path),
        "--data",
        str(rows),
        *(part for each in settings for part in ("--set", each)),
    ]


@pytest.mark.slow
def test_the_command_line_trains_adapters(
    package: Package, alone: Path, rows: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = ("adapters.rank=3", "adapters.layers=*d.weight,last.weight", "adapters.alpha=6")
    options = ["--run-dir", str(tmp_path / "run"), "--backend", "local", "--no-compile"]
    assert cli.run([*commanded(package, rows, *settings), *options]) == 0, capsys.readouterr().err
    assert read_spec(tmp_path / "run").overrides.adapters == ADAPTERS
    assert curve(tmp_path / "run") == curve(alone)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("adapters.rank=3",), "--set adapters: adapters.layers must be set as well"),
        (
            ("adapters.rank=0", "adapters.layers=*"),
            "--set adapters.rank=0: Input should be greater than or equal to 1",
        ),
        (
            ("adapters.dropout=0.1",),
            (
                "there is no setting adapters.dropout; available: accumulate, adapters.alpha,"
                " adapters.also"
            ),
        ),
    ],
)
def test_settings_of_adapters_that_are_wrong_are_told(
    package: Package, rows: Path, settings: Sequence[str], line: str, capsys: Capture
) -> None:
    assert cli.run(commanded(package, rows, *settings)) == 2
    assert line in capsys.readouterr().err


def test_a_plan_of_its_own_is_made_with_the_same_settings(
    package: Package, alone: Path, rows: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = [
        part
        for each in ("adapters.rank=3", "adapters.layers=*d.weight,last.weight", "adapters.alpha=6")
        for part in ("--set", each)
    ]
    assert (
        cli.run(["plan", str(package.path), "-o", str(tmp_path / "plan.json"), *settings]) == 0
    ), capsys.readouterr().err
    options = [
        "--plan",
        str(tmp_path / "plan.json"),
        "--run-dir",
        str(tmp_path / "run"),
        "--backend",
        "local",
        "--no-compile",
    ]
    assert cli.run(["launch", str(package.path), "--data", str(rows), *settings, *options]) == 0, (
        capsys.readouterr().err
    )
    assert curve(tmp_path / "run") == curve(alone)
