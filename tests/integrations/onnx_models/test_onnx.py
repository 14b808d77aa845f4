"""`trainload.export(to="onnx")`: ONNX Runtime computes what the package's graph does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.jobs import job
from tests.export.jobs import own_results, small_job
from tests.huggingface.test_job_of import frozen_gpt2
from torch import Tensor, nn

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PackageError
from trainload.packaging.package import Package

HINT = "is not installed: make integrations"
onnx = pytest.importorskip("onnx", reason=f"onnx {HINT}")
onnxruntime = pytest.importorskip("onnxruntime", reason=f"onnxruntime {HINT}")
pytest.importorskip("onnxscript", reason=f"onnxscript {HINT}")


class Layers(nn.Module):
    """(rows, 8) -> (rows, 8), with tied weights and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.norm(self.first(x)).relu() * torch.tensor([0.5]))
        return hidden


def predict(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    y = model(batch["x"]["values"]) * batch["scale"]
    return {"y": y, "best": y.argmax(-1)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    made = job(
        Layers(),
        predict=predict,
        batch={"x": {"values": torch.randn(4, 8)}, "scale": torch.rand(4, 1)},
        loss=lambda model, batch: model(batch["x"]["values"]).square().mean(),
    )
    return trainload.freeze(made, tmp_path_factory.mktemp("layers") / "layers.tl")


@pytest.fixture(scope="module")
def exported(package: Package, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainload.export(package, tmp_path_factory.mktemp("onnx") / "layers.onnx", to="onnx")


def computed(path: Path, batch: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    results = session.run(names, {name: value.numpy() for name, value in batch.items()})
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("rows", [2, 7])
def test_it_computes_what_the_graph_does(package: Package, exported: Any, rows: int) -> None:
    batch = {"x.values": torch.randn(rows, 8), "scale": torch.rand(rows, 1)}
    (expected,) = own_results(package, "predict", batch)
    found = computed(exported.path, batch)
    assert found.keys() == expected.keys() == set(exported.outputs)
    for name, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), value, rtol=1e-5, atol=1e-6)


def test_its_difference_from_the_graph_was_measured(exported: Any) -> None:
    assert 0 <= exported.difference < 1e-4


def test_onnx_accepts_the_file_and_its_note(package: Package, exported: Any) -> None:
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    entries = {each.key: each.value for each in model.metadata_props}
    note = json.loads(entries["trainload.json"])
    assert note["package"] == package.digest
    assert [each["name"] for each in note["inputs"]] == [each.name for each in model.graph.input]


def test_a_transformers_model_gives_its_logits(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package = frozen_gpt2(tmp_path_factory)
    path = tmp_path / "gpt.onnx"
    assert cli.run(["export", str(package.path), "--to", "onnx", "--output", str(path)]) == 0
    (session,) = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])]
    inputs = {each.name for each in session.get_inputs()}
    ids = torch.randint(3, 48, (3, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    (expected,) = own_results(package, "predict", batch)
    found = computed(path, {name: value for name, value in batch.items() if name in inputs})
    torch.testing.assert_close(
        torch.from_numpy(found["logits"]), expected["logits"], rtol=1e-4, atol=1e-5
    )


def test_a_graph_that_updates_buffers_is_refused(tmp_path: Path) -> None:
    package = trainload.freeze(small_job(), tmp_path / "small.tl")
    with pytest.raises(PackageError, match=r"updates buffers.*got calls"):
        trainload.export(package, tmp_path / "small.onnx", to="onnx")
    assert not list(tmp_path.glob("*.onnx"))


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    class Special(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            values: Tensor = torch.special.bessel_j0(self.layer(x).detach()) + self.layer(x)
            return values

    made = job(
        Special(),
        predict=lambda model, batch: {"y": model(batch["x"])},
        batch={"x": torch.randn(4, 8)},
        loss=lambda model, batch: model(batch["x"]).square().mean(),
    )
    package = trainload.freeze(made, tmp_path / "special.tl")
    with pytest.raises(PackageError, match="bessel_j0"):
        trainload.export(package, tmp_path / "special.onnx", to="onnx")
    assert not list(tmp_path.glob("*.onnx"))


class Line(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.to(self.layer.weight.dtype))
        return y.mean(-1, keepdim=True) + y


def line_job(dtype: torch.dtype, **outputs: str) -> trainload.Job:
    """Return a job whose predict function returns y, and inputs by the names of outputs."""
    return job(
        Line(dtype),
        predict=lambda model, batch: {
            "y": model(batch["x"]),
            **{name: batch[each] for name, each in outputs.items()},
        },
        batch={"x": torch.randn(4, 8)},
        loss=lambda model, batch: model(batch["x"]).float().square().mean(),
    )


def test_an_output_with_the_name_of_an_input_is_refused(tmp_path: Path) -> None:
    package = trainload.freeze(line_job(torch.float32, x="x"), tmp_path / "line.tl")
    with pytest.raises(PackageError, match=r"an output has the name of an input.*got x"):
        trainload.export(package, tmp_path / "line.onnx", to="onnx")


def test_an_input_that_is_returned_under_another_name_comes_out(tmp_path: Path) -> None:
    package = trainload.freeze(line_job(torch.float32, same="x"), tmp_path / "line.tl")
    trainload.export(package, tmp_path / "line.onnx", to="onnx")
    x = torch.randn(3, 8)
    assert torch.from_numpy(computed(tmp_path / "line.onnx", {"x": x})["same"]).equal(x)


def test_what_onnx_runtime_cannot_compute_is_written_without_the_comparison(
    tmp_path: Path,
) -> None:
    package = trainload.freeze(line_job(torch.bfloat16), tmp_path / "line.tl")
    with pytest.raises(PackageError, match=r"bfloat16.*--no-check"):
        trainload.export(package, tmp_path / "line.onnx", to="onnx")
    trainload.export(package, tmp_path / "line.onnx", to="onnx", check=False)
    (weight,) = [
        each for each in onnx.load(tmp_path / "line.onnx").graph.initializer if each.dims == [8, 8]
    ]
    stored = torch.frombuffer(bytearray(weight.raw_data), dtype=torch.bfloat16)
    assert stored.equal(package.weights.tensor("layer.weight").flatten())
