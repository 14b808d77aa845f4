"""Utilisation and memory of a run's devices."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

import trainload
from trainload.launching.node.build import uncompiled_build
from trainload.launching.node.utilisation import Utilisation, peaks_of, rate, used_bytes, work_of
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.planner.device import profile_of_product
from trainload.sharding.plans.device_step_graphs import step_graphs

ROWS, FEATURES, HIDDEN, CLASSES = 4, 6, 10, 3
CPU = torch.device("cpu")


class Net(torch.nn.Module):
    """Classifier of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Linear(FEATURES, HIDDEN),
            torch.nn.Linear(HIDDEN, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.second(torch.relu(self.first(x)))
        return found


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean square of the logits."""
    found: torch.Tensor = model(batch["x"]).square().mean()
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    job = trainload.Job(
        model=Net(),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch={"x": torch.randn(2, FEATURES)},
        global_batch=2 * ROWS,
        steps=3,
    )
    return trainload.freeze(job, tmp_path_factory.mktemp("net") / "net.tl")


def products(rows: int) -> float:
    """Return the floating-point operations of a step's matrix products.

    These are the forward of both layers, the backward of both for their weights, and the backward
    of the second for its input.
    """
    first, second = 2.0 * rows * FEATURES * HIDDEN, 2.0 * rows * HIDDEN * CLASSES
    return 2 * first + 3 * second


@pytest.mark.parametrize("rows", [1, ROWS, 64])
def test_the_work_of_a_step_is_that_of_its_products(package: Package, rows: int) -> None:
    fixed, each_row = work_of(step_graphs(package, CPU), rows)["train"]["float32"]
    assert fixed + each_row * rows == pytest.approx(products(rows))


@pytest.mark.slow
def test_convolutions_whose_input_needs_no_gradient_are_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = trainload.Job(
        model=torch.nn.Conv2d(3, 4, 3, bias=False),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch={"x": torch.randn(2, 3, 8, 8)},
        steps=3,
    )
    fixed, each_row = work_of(step_graphs(trainload.freeze(job, tmp_path / "conv.tl"), CPU), ROWS)[
        "train"
    ]["float32"]
    forward = 2.0 * (4 * 6 * 6) * (3 * 3 * 3)
    assert (fixed, each_row) == pytest.approx((0.0, 2 * forward))


def test_utilisation_is_the_share_of_all_devices(package: Package) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero2")
    work = uncompiled_build(package, plan, CPU).work
    found = Utilisation(work, package.recipe, plan, {"float32": 1e6}).of(0, [""], seconds=0.5)
    assert found == pytest.approx(products(2 * ROWS) / (2 * 1e6 * 0.5))


def test_work_does_not_depend_on_how_it_is_divided(package: Package) -> None:
    plans = (
        trainload.plan(
            package, trainload.Cluster(devices_per_node=ranks), "single" if ranks == 1 else "zero3"
        )
        for ranks in (1, 2)
    )
    found = [
        Utilisation(
            uncompiled_build(package, plan, CPU).work, package.recipe, plan, {"float32": 1e6}
        )
        for plan in plans
    ]
    assert found[0].of(0, [""], 1.0) == pytest.approx(2 * found[1].of(0, [""], 1.0))


@pytest.mark.parametrize(
    ("product", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GB200", 2250e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(
    product: str, bfloat16: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: product)
    assert peaks_of(torch.device("cuda"), ["bfloat16"], tmp_path)["bfloat16"] == bfloat16


@pytest.mark.parametrize("product", ["NVIDIA A10G", "NVIDIA GeForce RTX 4090", "NVIDIA H1000"])
def test_a_device_without_a_data_sheet_is_not_taken_for_another_one(product: str) -> None:
    assert profile_of_product(product) is None


def test_a_dtype_that_is_not_known_counts_as_float32() -> None:
    assert rate({"float32": 2.0}, "float64") == 2.0


def test_what_a_device_reaches_is_measured_once(tmp_path: Path) -> None:
    first = peaks_of(CPU, (), tmp_path)
    assert first["float32"] > 1e8
    assert peaks_of(CPU, ["float32"], tmp_path) == first


def test_a_dtype_that_was_not_measured_is_measured_later(tmp_path: Path) -> None:
    first = peaks_of(CPU, (), tmp_path)
    second = peaks_of(CPU, ["float64"], tmp_path)
    assert second["float32"] == first["float32"]
    assert second["float64"] > 1e7


def test_memory_is_what_the_process_holds() -> None:
    before = used_bytes(CPU)
    # `malloc` might use memory again that the process holds already
    held = mmap.mmap(-1, 1 << 26)
    held.write(bytes(len(held)))
    assert used_bytes(CPU) - before > len(held) // 2


def test_the_steps_of_a_run_have_their_utilisation_and_memory(
    package: Package, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.npz"

    np.savez(rows, x=np.zeros((64, FEATURES), np.float32))
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(package, plan, rows, run_dir=tmp_path / "run", compile=False, backend="local")
    steps = [event.data for event in read_events(tmp_path / "run") if event.kind == "step"]
    assert all(0 < step["mfu"] < 1 and step["memory"] > 1 << 20 for step in steps)
