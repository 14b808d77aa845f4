"""Jobs with several graphs train like a plain loop, on any number of workers.

The jobs cover loops of turns, feeds between graphs, and shared and separate optimizers.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.graph_jobs import JOBS, STEPS, Eager, digits, eager, frozen, gan, write_digits
from tests.laws.runs import TOLERANCE, Run, train
from tests.selection import selected
from torch import nn

import trainload
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.run.journal import read_events
from trainload.launching.run.result import RunResult
from trainload.packaging.package import Package

TWO = trainload.Cluster(devices_per_node=2)
HALF = STEPS // 2
CONTINUED = ("actor_critic-zero3", "gan-zero1")
"""Runs on two workers that are continued on one worker."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Package]:
    """Job name -> its package, frozen on first use."""
    return functools.cache(functools.partial(frozen, tmp_path_factory))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("digits")
    return {
        name: write_digits(folder / f"{name}.npz", set(job().batch)) for name, job in JOBS.items()
    }


class Plain(dict[str, Eager]):
    """Job name -> results of the plain loop, which runs on first use."""

    def __missing__(self, name: str) -> Eager:
        self[name] = eager(JOBS[name]())
        return self[name]


@pytest.fixture(scope="module")
def plain() -> dict[str, Eager]:
    return Plain()


def losses(run_dir: Path) -> list[dict[str, Any]]:
    """Return, for each step, the loss of the main graph and those of the others as "graph.loss"."""
    found = {
        e.data["step"]: {"loss": e.data["loss"], **e.data["metrics"]}
        for e in read_events(run_dir)
        if e.kind == "step"
    }
    return [found[step] for step in sorted(found)]


def assert_equal(run_dir: Path, job: trainload.Job, expected: Eager, steps: int = STEPS) -> None:
    """Check that all losses of all rounds equal those of the plain loop."""
    main = next(name for name, graph in job.graphs.items() if graph.loss is not None)
    found = losses(run_dir)
    assert len(found) == steps
    for number, (given, wanted) in enumerate(zip(found, expected.losses, strict=False)):
        for graph, loss in wanted.items():
            got = given["loss" if graph == main else f"{graph}.loss"]
            assert got == pytest.approx(loss, rel=TOLERANCE, abs=1e-7), (number, graph)


@pytest.mark.matrix("actor_critic")
@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_run_has_the_losses_and_weights_of_a_plain_loop(
    name: str,
    packages: Callable[[str], Package],
    data: dict[str, Path],
    plain: dict[str, Eager],
    tmp_path: Path,
) -> None:
    package = packages(name)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    options: Any = {"backend": "local", "compile": False, "output": tmp_path / "trained.tl"}
    trainload.launch(package, plan, data[name], run_dir=tmp_path / "run", **options)
    assert_equal(tmp_path / "run", JOBS[name](), plain[name])
    weights = trainload.open(tmp_path / "trained.tl").weights
    for parameter, value in plain[name].model.named_parameters():
        torch.testing.assert_close(weights.tensor(parameter), value.detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def pairs(
    packages: Callable[[str], Package],
    data: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """Folder of half-finished runs on two workers: every job under every strategy.

    zero0 and zero3 accumulate gradients over two microbatches.
    """
    folder = tmp_path_factory.mktemp("pairs")
    runs = []
    asked = selected(request, "pair")
    for name in JOBS:
        for strategy, accumulate in (("zero0", 2), ("zero1", 1), ("zero3", 2)):
            if (pair := f"{name}-{strategy}") in asked:
                package = packages(name)
                plan = trainload.plan(
                    package,
                    TWO,
                    strategy,  # type: ignore[arg-type]  # a strategy
                    accumulate=accumulate,
                    bucket_bytes=2000,
                )
                runs.append(Run(folder / pair, package, plan, data[name], {"steps": HALF}))
    train(2, runs, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [f"{name}-{strategy}" for name in sorted(JOBS) for strategy in ("zero0", "zero1", "zero3")],
)
def test_two_workers_have_the_losses_of_a_plain_loop(
    pair: str, pairs: Path, plain: dict[str, Eager]
) -> None:
    name, _, _ = pair.partition("-")
    assert_equal(pairs / pair, JOBS[name](), plain[name], HALF)


@pytest.mark.slow
def test_a_gan_trains_compiled_on_two_ray_workers(
    packages: Callable[[str], Package],
    data: dict[str, Path],
    plain: dict[str, Eager],
    tmp_path: Path,
    ray_cluster: None,
) -> None:
    package = packages("gan")
    trainload.launch(
        package, trainload.plan(package, TWO, "zero3"), data["gan"], run_dir=tmp_path / "run"
    )
    assert_equal(tmp_path / "run", JOBS["gan"](), plain["gan"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=pair.partition("-")[0]) for pair in CONTINUED]
)
def test_a_run_of_two_workers_continues_on_one(
    pair: str, pairs: Path, plain: dict[str, Eager], tmp_path: Path
) -> None:
    name, _, _ = pair.partition("-")
    run_dir = tmp_path / "run"
    shutil.copytree(pairs / pair, run_dir)
    trainload.resume(run_dir, steps=STEPS, workers=1, backend="local")
    assert_equal(run_dir, JOBS[name](), plain[name])


def test_evaluation_gives_every_graphs_loss(
    packages: Callable[[str], Package],
    data: dict[str, Path],
    tmp_path: Path,
    plain: dict[str, Eager],
) -> None:
    package, rows = packages("actor_critic"), data["actor_critic"]
    plan = trainload.plan(package, trainload.Cluster(), "single")
    options: Any = {"backend": "local", "compile": False, "eval_data": rows}
    result = trainload.launch(package, plan, rows, run_dir=tmp_path / "run", steps=STEPS, **options)
    model, job = plain["actor_critic"].model.eval(), JOBS["actor_critic"]()
    critic, actor = job.graphs["critic"].loss, job.graphs["actor"].loss
    assert critic is not None and actor is not None
    with torch.no_grad():
        whole = {n: t for n, t in digits().items() if n in job.batch}
        first: Any = critic(model, whole)
        second: Any = actor(model, {**whole, **first.outputs})
    last = result.evaluations[-1]
    assert last["loss"] == pytest.approx(first.value.item(), rel=1e-4)
    assert last["metrics"]["actor.loss"] == pytest.approx(second.item(), rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def own(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Run of the GAN with a loss scale per graph, and an average of the generator's parameters."""
    folder = tmp_path_factory.mktemp("own")
    job = gan(loss_scaling=trainload.LossScaling(init_scale=2.0**10, growth_interval=4))
    generator = replace(job.graphs["generator"], ema=trainload.Ema(0.5))
    package = trainload.freeze(
        replace(job, graphs={**job.graphs, "generator": generator}), folder / "gan.tl"
    )
    plan = trainload.plan(package, trainload.Cluster(), "single")
    options: Any = {"backend": "local", "compile": False, "output": folder / "mean.tl"}
    return trainload.launch(package, plan, data["gan"], run_dir=folder / "run", **options)


@pytest.mark.slow
def test_a_graphs_own_mean_is_of_its_own_parameters(own: RunResult) -> None:
    expected: dict[str, torch.Tensor] = {}
    for steps in range(1, STEPS + 1):
        for name, parameter in eager(replace(gan(), steps=steps)).model.named_parameters():
            new = parameter.detach()
            expected[name] = (
                torch.lerp(expected[name], new, 0.5)
                if name in expected and name.startswith("generator")
                else new
            )
    assert own.output is not None
    weights = trainload.open(own.output).weights
    for name, value in expected.items():
        torch.testing.assert_close(weights.tensor(name), value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_graph_has_a_scale_of_its_own(own: RunResult, plain: dict[str, Eager]) -> None:
    assert_equal(Path(own.run_dir), gan(), plain["gan"])
    kept = Checkpoint.open(own.checkpoint).index.user["loss scaling"]
    # after 8 and 16 updates
    assert {graph: entry["scale"] for graph, entry in kept.items()} == {
        "generator": 2.0**12,
        "discriminator": 2.0**14,
    }


@pytest.mark.slow
def test_graphs_draw_random_numbers_of_their_own(tmp_path: Path) -> None:
    def drawn(model: nn.Module, batch: dict[str, torch.Tensor]) -> trainload.Loss:
        noise = torch.rand(batch["x"].shape[0])
        return trainload.Loss(model(batch["x"]).square().mean(), metrics={"noise": noise.mean()})

    torch.manual_seed(0)
    graphs = {name: trainload.Graph(loss=drawn) for name in ("first", "second")}
    job = trainload.Job(
        nn.Linear(4, 1),
        {"x": torch.randn(4, 4)},
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        graphs=graphs,
        steps=2,
        loop=["first", trainload.Turn("second", times=2)],
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    np.savez(tmp_path / "x.npz", x=np.ones((8, 4), np.float32))
    options: Any = {"backend": "local", "compile": False}
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(package, plan, tmp_path / "x.npz", run_dir=tmp_path / "run", **options)
    found = [
        value
        for step in losses(tmp_path / "run")
        for name, value in step.items()
        if "noise" in name
    ]
    assert len(set(found)) == len(found) == 4
