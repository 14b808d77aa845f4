"""A job with several variants, declared or recorded, trains on a mixture like a plain loop."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.golden.goldens import Golden, goldens
from tests.launch.variant_jobs import (
    CONSTANTS,
    ROWS,
    STEPS,
    VARIANTS,
    WEIGHTS,
    Eager,
    eager,
    example,
    job,
    model,
    options,
    parts,
    write_mixture,
)
from tests.laws.runs import TOLERANCE, Run, curve, train
from tests.selection import selected
from torch import nn

import trainload
from trainload.launching.data.batch_order import BatchOrder
from trainload.launching.run.journal import read_events
from trainload.launching.run.result import RunResult
from trainload.packaging.package import Package

TWO = trainload.Cluster(devices_per_node=2)
IN_PROCESS: Any = {"backend": "local", "compile": False}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job(), tmp_path_factory.mktemp("written") / "job.tl")


@pytest.fixture(scope="module")
def recording() -> trainload.Job:
    """Job of a recording that covers all variants."""
    net = model()
    with trainload.record(net) as recording:
        for _ in range(2):
            net(**example(0))
        for part in (1, 2, 3):
            net(**example(part))
        net(**{**example(0), "image": torch.rand(4, 1, 24, 24)})
    return recording.job(**options())


@pytest.fixture(scope="module")
def recorded(recording: trainload.Job, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(recording, tmp_path_factory.mktemp("recorded") / "job.tl")


@pytest.fixture(scope="module")
def plain() -> Eager:
    return eager()


def steps(run_dir: Path) -> list[dict[str, Any]]:
    found = {e.data["step"]: dict(e.data) for e in read_events(run_dir) if e.kind == "step"}
    return [found[step] for step in sorted(found)]


def assert_equal(run_dir: Path, expected: Eager, count: int = STEPS) -> None:
    found = [step["loss"] for step in steps(run_dir)]
    assert len(found) == count
    assert found == pytest.approx(expected.losses[:count], rel=TOLERANCE)


def test_a_job_of_variants_trains_a_batch_of_this_many_rows(written: Package) -> None:
    assert written.recipe.global_batch == ROWS


def test_the_plain_loop_takes_every_part(plain: Eager) -> None:
    assert set(plain.parts) == {0, 1, 2, 3}


@dataclass(frozen=True)
class Trained:
    """A run on one worker: its folder and its result."""

    run_dir: Path
    result: RunResult


@pytest.fixture(scope="module")
def trained(written: Package, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    plan = trainload.plan(written, trainload.Cluster(), "single")
    options: Any = {"output": folder / "trained.tl", "eval_data": mixture, **IN_PROCESS}
    return Trained(
        folder / "run", trainload.launch(written, plan, mixture, run_dir=folder / "run", **options)
    )


def test_a_run_has_the_losses_and_weights_of_a_plain_loop(trained: Trained, plain: Eager) -> None:
    assert_equal(trained.run_dir, plain)
    assert trained.result.output is not None
    weights = trainload.open(trained.result.output).weights
    for name, value in plain.model.named_parameters():
        torch.testing.assert_close(weights.tensor(name), value.detach(), rtol=1e-4, atol=1e-5)


def test_every_step_says_its_variant(trained: Trained, plain: Eager) -> None:
    assert [step["variants"] for step in steps(trained.run_dir)] == [
        [VARIANTS[part]] for part in plain.parts
    ]


@pytest.fixture(scope="module")
def pairs(
    written: Package,
    mixture: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """Folder of uncompiled runs on two workers: every strategy, with and without accumulation."""
    folder = tmp_path_factory.mktemp("pairs")
    runs = []
    asked = selected(request, "strategy")
    for strategy, accumulate in (("zero0", 1), ("zero1", 3), ("zero3", 2)):
        if strategy not in asked:
            continue
        plan = trainload.plan(written, TWO, strategy, accumulate=accumulate, bucket_bytes=1500)  # type: ignore[arg-type]  # a strategy
        runs.append(Run(folder / strategy, written, plan, mixture))
    train(2, runs, folder)
    return folder


@pytest.mark.slow  # a test below continues a run of a smaller job on two workers
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
def test_two_workers_have_the_losses_of_a_plain_loop(
    strategy: str, pairs: Path, plain: Eager
) -> None:
    assert_equal(pairs / strategy, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), [("written", "zero3"), ("recorded", "zero0")])
def test_it_trains_on_two_ray_workers(
    kind: str,
    strategy: Any,
    request: pytest.FixtureRequest,
    mixture: Path,
    plain: Eager,
    tmp_path: Path,
    ray_cluster: None,
) -> None:
    package: Package = request.getfixturevalue(kind)
    trainload.launch(
        package,
        trainload.plan(package, TWO, strategy),
        mixture,
        run_dir=tmp_path / "run",
        compile=False,
    )
    assert_equal(tmp_path / "run", plain)


@pytest.fixture(scope="module")
def either() -> Golden:
    """The smallest job with two variants: with and without an optional column."""
    return next(each for each in goldens() if each.name == "variants")


@pytest.fixture(scope="module")
def either_losses(either: Golden, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uncompiled run of that job on one worker."""
    run_dir = tmp_path_factory.mktemp("either") / "run"
    trained_either(either, run_dir, STEPS, compiled=False)
    return curve(run_dir)


def trained_either(either: Golden, run_dir: Path, count: int, *, compiled: bool) -> None:
    package = trainload.open(either.package)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package, plan, either.data, run_dir=run_dir, steps=count, backend="local", compile=compiled
    )


@pytest.mark.slow
def test_it_trains_compiled(either: Golden, either_losses: list[float], tmp_path: Path) -> None:
    """One worker and few operators, because compiling is slow.

    The graphs of all variants are compiled in the same way.
    """
    trained_either(either, tmp_path / "run", 4, compiled=True)
    assert {step["variants"][0] for step in steps(tmp_path / "run")} == {"", "hinted"}
    assert curve(tmp_path / "run") == pytest.approx(either_losses[:4], rel=TOLERANCE)


@pytest.mark.slow  # tests/record covers the results of recordings
def test_a_recording_finds_the_variants(recording: trainload.Job) -> None:
    assert list(recording.variants) == ["image_1_8_8", "with_hint", "task_parity"]


@pytest.mark.slow
def test_a_run_of_two_workers_continues_on_one(
    either: Golden, either_losses: list[float], tmp_path: Path
) -> None:
    package = trainload.open(either.package)
    run = Run(
        tmp_path / "run", package, trainload.plan(package, TWO, "zero3"), either.data, {"steps": 4}
    )
    train(2, [run], tmp_path)
    trainload.resume(run.run_dir, steps=STEPS, workers=1, backend="local")
    assert {step["variants"][0] for step in steps(run.run_dir)[4:]} == {"", "hinted"}
    assert curve(run.run_dir) == pytest.approx(either_losses, rel=TOLERANCE)


def test_evaluation_takes_every_row_of_every_part(trained: Trained) -> None:
    net = model().eval()
    with torch.no_grad():
        sums = [
            net(**rows, **given).item() * len(rows["label"])
            for rows, given in zip(parts(), CONSTANTS, strict=True)
        ]
    assert trained.result.evaluations[0]["loss"] == pytest.approx(
        sum(sums) / sum(len(rows["label"]) for rows in parts()), rel=1e-5
    )


@pytest.mark.slow
def test_a_data_set_without_the_optional_column_trains_the_variant_without_it(
    either: Golden, tmp_path: Path
) -> None:
    package = trainload.open(either.package)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    for part, variant in ((0, ""), (1, "hinted")):
        run_dir = tmp_path / f"run-{part}"
        trainload.launch(
            package,
            plan,
            either.folder / f"part-{part}.npz",
            run_dir=run_dir,
            steps=2,
            **IN_PROCESS,
        )
        assert [step["variants"] for step in steps(run_dir)] == [[variant], [variant]]


def test_the_weights_make_the_cycle(written: Package, mixture: Path, plain: Eager) -> None:
    cycle = plain.parts[: int(sum(WEIGHTS))]
    assert [cycle.count(part) for part in range(4)] == [int(weight) for weight in WEIGHTS]


def teach(net: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"logits": net.get_submodule("teacher")(batch["x"])}


def learn(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    y = net.get_submodule("student")(batch["x"])
    if "mask" in batch:
        y = y * batch["mask"]
    off: torch.Tensor = y - batch["wanted"]
    return off.square().mean()


@pytest.mark.slow
def test_graphs_that_feed_one_another_have_variants_too(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict(
            {"teacher": nn.Linear(4, 3).requires_grad_(False), "student": nn.Linear(4, 3)}
        )

    graphs = {
        "teach": trainload.Graph(compute=teach, inputs=["x"]),
        "learn": trainload.Graph(loss=learn, feeds={"wanted": "teach.logits"}),
    }
    torch.manual_seed(1)
    plain_rows, masked_rows = (
        {"x": torch.randn(20, 4)},
        {"x": torch.randn(20, 4), "mask": torch.rand(20, 3)},
    )
    job = trainload.Job(
        net(),
        {"x": plain_rows["x"][:4]},
        lambda model: torch.optim.SGD(
            model.get_submodule("student").parameters(), 0.1, momentum=0.9
        ),
        graphs=graphs,
        variants={"masked": {name: tensor[:4] for name, tensor in masked_rows.items()}},
        steps=6,
        global_batch=8,
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    for name, columns in (("plain", plain_rows), ("masked", masked_rows)):
        np.savez(tmp_path / f"{name}.npz", **{n: t.numpy() for n, t in columns.items()})  # type: ignore[arg-type]  # arrays, not flags
    (tmp_path / "m.json").write_text(
        json.dumps({"parts": [{"data": "plain.npz"}, {"data": "masked.npz"}]})
    )
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(package, plan, tmp_path / "m.json", run_dir=tmp_path / "run", **IN_PROCESS)

    model, order, losses = net(), BatchOrder(0, (20, 20), (1, 1)), []
    optimizer = torch.optim.SGD(model.get_submodule("student").parameters(), 0.1, momentum=0.9)
    for step in range(6):
        part, before = order.part(step)
        chosen = torch.from_numpy(order.rows(part, before, 8, 0, 8))
        batch = {name: tensor[chosen] for name, tensor in (plain_rows, masked_rows)[part].items()}
        optimizer.zero_grad()
        loss = learn(model, {**batch, "wanted": teach(model, batch)["logits"].detach()})
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(loss.item())
    assert [step["loss"] for step in steps(tmp_path / "run")] == pytest.approx(
        losses, rel=TOLERANCE
    )
    assert {step["variants"][0] for step in steps(tmp_path / "run")} == {"", "masked"}
