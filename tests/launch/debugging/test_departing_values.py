"""The first value at which a step parts from another execution of it: in float64, compiled, or
recorded on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.launch.debugging.planted_faults import (
    ROWS,
    WIDTH,
    freeze,
    plain_batch,
    rolled_loss,
    save,
)
from tests.launch.planted import FAULTS, job, planted
from tests.launch.tiny import write_rows
from tests.shared import frozen_once
from torch import Tensor, nn

import trainload
from trainload.cli.main import run
from trainload.core.errors import RequestError, StorageError
from trainload.launching.debugging.recorded_values import RecordedValues
from trainload.launching.debugging.value_sketch import relative_distance_of, sketch_of
from trainload.packaging.package import Package

LAYERS = 4
FAULTY = 2


class Layer(nn.Module):
    """A layer that can lose small numbers in float16; x (rows, WIDTH)."""

    def __init__(self, *, loses: bool) -> None:
        super().__init__()
        self.linear, self.loses = nn.Linear(WIDTH, WIDTH), loses

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        if self.loses:
            small = y.half() * 2.0**-15
            y = (small * 2.0**-8).float() * 2.0**23
        return x + y


def model(*, faulty: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(loses=number == faulty) for number in range(LAYERS)))


Frozen = Callable[[nn.Module], Package]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    def freeze_once(module: nn.Module) -> Package:
        return freeze(tmp_path_factory.mktemp("package"), module, rolled_loss, plain_batch())

    return freeze_once


@pytest.fixture(scope="module")
def healthy(frozen: Frozen) -> Package:
    return frozen(model())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = np.random.default_rng(0).standard_normal((4 * ROWS, WIDTH), dtype=np.float32)
    return save(tmp_path_factory.mktemp("data") / "rows.npz", x=x)


@pytest.fixture(scope="module")
def record(healthy: Package, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The values of the first step of a package."""
    path = tmp_path_factory.mktemp("record") / "step.values"
    trainload.record_step(healthy, path, data=data)
    return path


# float64


def test_a_step_in_float32_does_not_depart_from_float64(healthy: Package, data: Path) -> None:
    values = trainload.compare_step(healthy, "float64", data=data).values
    assert values.first is None
    assert 0 < max(each.distance for each in values.values) < 1e-5


def test_all_modules_and_gradients_are_compared(healthy: Package, data: Path) -> None:
    values = trainload.compare_step(healthy, "float64", data=data).values.values
    what = {each.what for each in values}
    assert {f"gradient of {entry.name}" for entry in healthy.parameters} <= what
    assert {f"result of {number}" for number in range(LAYERS)} <= what


@pytest.mark.parametrize("faulty", [0, 2])
def test_numbers_that_are_lost_in_half_precision_are_found_with_their_line(
    frozen: Frozen, data: Path, faulty: int
) -> None:
    first = trainload.compare_step(frozen(model(faulty=faulty)), "float64", data=data).values.first
    assert first is not None
    assert (first.what, first.module, first.part) == ("aten.mul.Tensor", str(faulty), "forward")
    assert first.line.endswith("y = (small * 2.0**-8).float() * 2.0**23")
    assert first.distance > 0.1


# A record of another machine


def test_a_step_equals_its_record(healthy: Package, data: Path, record: Path) -> None:
    comparison = trainload.compare_step(healthy, record, data=data)
    assert comparison.values.first is None
    assert {each.distance for each in comparison.values.values} == {0.0}
    assert comparison.against.startswith(f"torch {torch.__version__} on cpu")


@pytest.fixture(scope="module")
def other(frozen: Frozen) -> Package:
    """The package with another bias in one layer, in place of a device that computes it wrong."""
    changed = model()
    with torch.no_grad():
        changed[FAULTY].linear.bias += 1e-4  # type: ignore[union-attr,operator]  # a layer
    return frozen(changed)


def test_a_layer_that_computes_something_else_is_found(
    other: Package, data: Path, record: Path
) -> None:
    values = trainload.compare_step(other, record, data=data).values
    assert values.by_operators
    assert values.first is not None
    assert (values.first.module, values.first.part) == (f"{FAULTY}.linear", "forward")
    assert "linear" in values.first.line


def renamed(record: Path, path: Path) -> Path:
    """Write a record as another version of torch would: with other nodes."""
    with safe_open(str(record), "pt") as file:
        metadata = dict(file.metadata())
    origins = [{**each, "node": f"n{each['node']}"} for each in json.loads(metadata["origins"])]
    save_file(load_file(record), path, {**metadata, "origins": json.dumps(origins)})
    return path


def test_other_graphs_are_compared_by_modules(
    other: Package, data: Path, record: Path, tmp_path: Path
) -> None:
    values = trainload.compare_step(other, renamed(record, tmp_path / "other"), data=data).values
    assert not values.by_operators
    assert values.first is not None
    assert values.first.what in (f"result of {FAULTY}.linear", f"result of {FAULTY}")


def test_a_record_is_not_replaced(healthy: Package, data: Path, record: Path) -> None:
    with pytest.raises(StorageError, match="exists already"):
        trainload.record_step(healthy, record, data=data)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_damaged_record_is_an_error(record: Path, data: st.DataObject) -> None:
    content = bytearray(record.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 400))] ^= data.draw(st.integers(1, 255))
    damaged = record.parent / "damaged"
    damaged.write_bytes(content)
    with suppress(StorageError):  # a bit of a number may be changed
        RecordedValues.load(damaged)


def test_a_record_that_does_not_exist_is_an_error(healthy: Package, data: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        trainload.compare_step(healthy, Path("none.values"), data=data)


def test_a_package_needs_rows(healthy: Package) -> None:
    with pytest.raises(RequestError, match="a package needs data"):
        trainload.compare_step(healthy, "float64")


@given(st.integers(1, 5000), st.floats(1e-6, 1), st.integers(0, 100))
def test_sketches_estimate_distances(count: int, distance: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(count, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    other = own + noise * (distance * own.norm() / noise.norm())
    norm, other_norm = float(own.norm()), float(other.norm())
    found = relative_distance_of(sketch_of(own), norm, sketch_of(other), other_norm)
    assert found == pytest.approx(distance * norm / max(norm, other_norm), rel=0.5)


# Compiled


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache for one test, so that no other test uses the output of a faulty compiler."""
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("fault", ["", "forward, a wrong kernel", "update, a dropped weight"])
def test_a_wrong_kernel_is_found_with_its_operator_and_line(
    fault: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    package = frozen_once(tmp_path_factory, "planted", job)
    rows = write_rows(tmp_path / "rows.npz", 40)
    if not fault:
        assert trainload.compare_compiled(package, data=rows).departing == []
        return
    with planted(fault):
        (found,) = trainload.compare_compiled(package, data=rows).departing
    assert found.operator == str(FAULTS[fault][0])
    if fault.startswith("forward"):
        assert "functional.relu" in found.place


# The command


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(["debug", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_command_names_the_value_and_its_line(
    frozen: Frozen, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = frozen(model(faulty=FAULTY))
    capsys.readouterr()
    text = shown(capsys, package.path, "--data", data, "--against", "float64")
    assert f"aten.mul.Tensor departs in the forward of {FAULTY}" in text
    assert f"gradient of {FAULTY}.linear.weight" in text


def test_the_command_records_values_and_compares_with_them(
    healthy: Package, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, healthy.path, "--data", data, "--record", tmp_path / "values")
    text = shown(capsys, healthy.path, "--data", data, "--against", tmp_path / "values")
    assert "nothing: rounding explains all differences" in text


def test_ways_of_searching_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["debug", "m.tl", "--compare", "--against", "float64"]) == 2
    assert "exclude each other" in capsys.readouterr().err
