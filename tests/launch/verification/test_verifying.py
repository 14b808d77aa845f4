"""Compiled graphs are compared with the interpreted graphs before training.

Graphs that differ run interpreted.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture import jobs as models
from tests.launch.planted import FAULTS, job, planted, train_with_fault
from tests.launch.tiny import write_rows
from tests.laws.runs import Run, curve, difference, train
from tests.shared import frozen_once
from torch import Tensor, nn
from torch.fx import GraphModule

import trainload
from trainload import Job
from trainload.autograd_trace.compiling.inductor import Compiled, NotCompiled, compile_graph
from trainload.autograd_trace.derivation.aot import derive
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CompileError
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.run.journal import Event, read_events
from trainload.launching.verification import rounding
from trainload.launching.verification import verify_build as verifying
from trainload.launching.worker.loop import GRAPHS
from trainload.packaging.package import Package
from trainload.sharding.plans.strategies import Strategy

STEPS = 4
ABS = "forward, a wrong kernel"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen_once(tmp_path_factory, "planted", job)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.npz", 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache for one test, so that no other test uses the output of a faulty compiler."""
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def launched(package: Package, data: Path, run_dir: Path, **options: Any) -> list[float]:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package, plan, data, run_dir=run_dir, backend="local", **{"steps": STEPS, **options}
    )
    return curve(run_dir)


def warnings_of(run_dir: Path) -> list[Event]:
    return [event for event in read_events(run_dir) if event.kind == "warning"]


@pytest.fixture(scope="module")
def expected(package: Package, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return launched(package, data, tmp_path_factory.mktemp("plain") / "run", compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("cache")
def test_a_fault_of_the_compiler_is_found_with_its_operator(
    fault: str, package: Package, data: Path, expected: list[float], tmp_path: Path
) -> None:
    with planted(fault):
        losses = launched(package, data, tmp_path / "run")
    found = {
        warning.data["operator"]: warning.data["graph"] for warning in warnings_of(tmp_path / "run")
    }
    assert found == {
        str(FAULTS[fault][0]): "train.update" if fault.startswith("update") else "train.only"
    }
    assert difference(losses, expected) < 1e-5


def launched_on_two_ranks(
    fault: str, package: Package, data: Path, folder: Path, strategy: Strategy, **axes: Any
) -> tuple[Path, list[float]]:
    """Train compiled with an injected fault; return the run's folder and its losses."""
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), strategy, **axes)
    run = Run(folder / "run", package, plan, data, {"steps": STEPS, "compile": True})
    (losses,) = train(2, [run], folder, act=partial(train_with_fault, fault))
    assert {warning.data["operator"] for warning in warnings_of(run.run_dir)} == {
        str(FAULTS[fault][0])
    }
    return run.run_dir, losses


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("cache")
def test_two_ranks_find_it_and_decide_alike(
    fault: str, package: Package, data: Path, expected: list[float], tmp_path: Path
) -> None:
    _, losses = launched_on_two_ranks(fault, package, data, tmp_path, "zero3")
    assert difference(losses, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("cache")
def test_ranks_of_a_pipeline_compare_the_graphs_of_their_stages(
    fault: str, package: Package, data: Path, expected: list[float], tmp_path: Path
) -> None:
    run_dir, losses = launched_on_two_ranks(
        fault, package, data, tmp_path, "zero0", pipeline_ranks=2, accumulate=2
    )
    assert difference(losses, expected) < 1e-5
    (path,) = run_dir.glob("checkpoints/step-*")
    (decided,) = Checkpoint.open(path).index.user[GRAPHS].values()
    assert {name for name, interpreted in decided.items() if interpreted} == {
        warning.data["graph"] for warning in warnings_of(run_dir)
    }
    assert {name.split(".")[1] for name in decided} >= {"stage0", "stage1"}


# A job whose graphs compile quickly


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).relu()


def small_job() -> Job:
    torch.manual_seed(0)
    return Job(
        Small(),
        {"x": torch.randn(4, 4)},
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        loss=small_loss,
    )


def small_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen_once(tmp_path_factory, "small", small_job)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "x.npz"
    np.savez(path, x=np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32))
    return path


@pytest.mark.alone
@pytest.mark.slow
def test_a_compiled_pipeline_trains_as_one_process(small_data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    job = Job(
        model,
        {"x": torch.randn(4, 4)},
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        loss=small_loss,
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    expected = launched(package, small_data, tmp_path / "plain", compile=False)
    plan = trainload.plan(
        package, trainload.Cluster(devices_per_node=2), "zero0", pipeline_ranks=2, accumulate=2
    )
    (losses,) = train(
        2,
        [Run(tmp_path / "run", package, plan, small_data, {"steps": STEPS, "compile": True})],
        tmp_path,
    )
    assert difference(losses, expected) < 1e-5
    assert warnings_of(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_where_memory_is_short_graphs_are_compared_on_fewer_rows(
    small: Package, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = launched(small, small_data, tmp_path / "plain", compile=False)
    asked: list[int] = []

    def fitting(module: GraphModule, inputs: object, rows: int, device: torch.device) -> int:
        asked.append(rows)
        return 1

    monkeypatch.setattr(verifying, "fitting_rows", fitting)
    losses = launched(small, small_data, tmp_path / "run")
    assert asked == [small.recipe.global_batch]
    assert difference(losses, expected) < 1e-5


@pytest.mark.usefixtures("cache")
def test_graphs_that_agree_are_compared_once_and_trained(
    small: Package, small_data: Path, tmp_path: Path
) -> None:
    losses = launched(small, small_data, tmp_path / "run")
    assert difference(losses, launched(small, small_data, tmp_path / "plain", compile=False)) < 1e-5
    assert warnings_of(tmp_path / "run") == []
    assert {path.stem for path in tmp_path.glob("cache/compiled/*/verified/*")} == {
        "train.only",
        "train.update",
    }


@pytest.mark.usefixtures("cache")
def test_what_rounding_explains_is_measured_once_for_a_graph(
    small: Package, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    runs = rounding.rounded_runs

    def counted(module: GraphModule, *arguments: Any, **options: Any) -> Any:
        measured.append(id(module))
        return runs(module, *arguments, **options)

    monkeypatch.setattr(verifying, "rounded_runs", counted)
    monkeypatch.setattr(verifying, "EXPLAINED", -1.0)  # nothing is explained without it
    launched(small, small_data, tmp_path / "run")
    assert len(measured) == len(set(measured)) == 2  # the step and the update
    assert warnings_of(tmp_path / "run") == []


@dataclass(frozen=True, slots=True)
class Faulty:
    """A run with a faulty compiler and its own cache."""

    run_dir: Path
    losses: list[float]
    cache: Path


@pytest.fixture(scope="module")
def faulty(small: Package, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch, planted(ABS):
        patch.setenv("TRAINLOAD_CACHE_DIR", str(folder / "cache"))
        losses = launched(small, small_data, folder / "run", checkpoint_every=2)
    return Faulty(folder / "run", losses, folder / "cache")


def test_a_graph_that_differs_is_told_with_its_operator_line_output_and_distance(
    faulty: Faulty,
) -> None:
    (warning,) = (warning.data for warning in warnings_of(faulty.run_dir))
    assert warning["graph"] == "train.only"
    assert warning["operator"] == "aten.relu.default"
    assert "test_verifying.py" in warning["place"] and "(x * self.scale).relu()" in warning["place"]
    assert warning["output"] in ("gradient of scale", "loss, metrics and weight")
    assert warning["distance"] > warning["explained"]


def test_it_trains_as_the_interpreted_graph(
    faulty: Faulty, small: Package, small_data: Path, tmp_path: Path
) -> None:
    assert faulty.losses == launched(small, small_data, tmp_path / "run", compile=False)


def test_a_later_run_on_the_node_says_so_without_comparing_again(
    faulty: Faulty,
    small: Package,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(faulty.cache))
    monkeypatch.setattr(verifying, "_ComparedCall", None)
    assert launched(small, small_data, tmp_path / "run") == faulty.losses
    (warning,) = warnings_of(tmp_path / "run")
    assert warning.data["operator"] == "aten.relu.default"


def test_a_run_that_goes_on_elsewhere_keeps_what_was_decided(
    faulty: Faulty, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(faulty.run_dir, tmp_path / "run")
    shutil.rmtree(moved / "checkpoints" / f"step-{STEPS:08}")
    # without the fault, a comparison would let the graph run compiled
    monkeypatch.setattr(verifying, "_ComparedCall", None)
    trainload.resume(moved, backend="local")
    assert curve(moved, once=True) == faulty.losses


def test_a_run_that_requires_compiled_graphs_ends(
    faulty: Faulty,
    small: Package,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(faulty.cache))
    with pytest.raises(
        CompileError,
        match=r"train\.only differs from the interpreted one .* at aten\.relu\.default",
    ):
        launched(small, small_data, tmp_path / "run", require_compiled=True)


def test_a_dry_run_names_it(
    faulty: Faulty,
    small: Package,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(faulty.cache))
    plan = trainload.plan(small, trainload.Cluster(), "single")
    report = trainload.dry_run(
        small, plan, small_data, run_dir=tmp_path / "run", backend="local", steps=STEPS
    )
    assert report.compiled_already
    assert ["aten.relu.default" in each for each in report.interpreted] == [True]


def test_a_graph_that_cannot_be_compiled_runs_interpreted(
    small: Package,
    small_data: Path,
    faulty: Faulty,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(module: GraphModule, path: Path, *rest: Any) -> Compiled:
        if path.stem == "train.only":
            raise NotCompiled("InductorError: it cannot be lowered")
        return compile_graph(module, path, *rest)

    monkeypatch.setattr("trainload.launching.node.build.compile_graph", failing)
    assert launched(small, small_data, tmp_path / "run") == faulty.losses
    (warning,) = warnings_of(tmp_path / "run")
    assert "it cannot be lowered" in warning.data["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_graph_that_torch_compiles_and_cannot_save_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conditional(_: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
        return found

    monkeypatch.setattr("trainload.autograd_trace.compiling.inductor._CACHEABLE", ())
    step = derive(capture(models.job(models.Model(conditional))), "train", torch.device("cpu"))
    with pytest.raises(NotCompiled):
        compile_graph(step.module, tmp_path / "artifact", {})


@pytest.mark.usefixtures("cache")
def test_a_cache_that_cannot_be_written_stops_no_run(
    small: Package, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("trainload.launching.node.graph_comparison.replace_file", full)
    assert len(launched(small, small_data, tmp_path / "run")) == STEPS
