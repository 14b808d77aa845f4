"""initialization.json as a hostile file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.packaging.tampering import edit_manifest, reseal
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import PackageError
from trainload.packaging.initialization.initial_file import read_initialization
from trainload.packaging.package import Package

FILE = "initialization.json"
Change = Callable[[dict[str, Any]], object]


class Model(nn.Module):
    """A random matrix with a row of zeros, a table, and values from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4, padding_idx=3)
        self.register_buffer("table", torch.arange(4) / 4)
        self.register_buffer("given", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.embedding(x) * self.table + self.given
        return found


def job() -> trainload.Job:
    return trainload.Job(
        model=Model(),
        batch={"x": torch.tensor([0, 1]), "y": torch.tensor([3, 2])},
        loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job, tmp_path_factory.mktemp("initial") / "job.tl")


def changed(original: Package, path: Path, change: Change) -> Package:
    """Return a copy with another document, and digests that fit it."""
    shutil.copytree(original.path, path)
    document = json.loads((path / FILE).read_bytes())
    change(document)
    (path / FILE).unlink()
    (path / FILE).write_bytes(canonical_json(document))
    reseal(path)
    return trainload.open(path)


def node_of(document: dict[str, Any], operator: str) -> dict[str, Any]:
    """Return the first node of any graph that calls an operator."""
    return next(
        node
        for entry in document["graphs"]
        for node in entry["graph"]["graph_module"]["graph"]["nodes"]
        if node["target"] == f"torch.ops.aten.{operator}"
    )


def calls_another(old: str, new: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        node_of(document, old)["target"] = f"torch.ops.{new}"

    return change


def states_a_size(document: dict[str, Any]) -> None:
    """State that a table of 2**40 elements has four, which hides its size."""
    node = node_of(document, "arange.default")
    node["inputs"][0]["arg"] = {"as_int": 2**40}


def with_value(**values: Any) -> Change:
    return lambda document: document["values"]["table"].update(values)


CHANGES: dict[str, tuple[Change, str]] = {
    "another field": (lambda d: d.update(more=1), "is wrong"),
    "an unknown distribution": (
        lambda d: d["graphs"][0]["draws"][0].update(distribution="levy"),
        "is wrong",
    ),
    "an operator that changes its input": (
        calls_another("select_scatter.default", "aten.add_.Tensor"),
        "",
    ),
    "an operator that reads files": (
        calls_another("arange.default", "aten.from_file.default"),
        "denied",
    ),
    "an operator of another library": (
        calls_another("arange.default", "evil.run.default"),
        "another library",
    ),
    "a size that is not stated": (states_a_size, "wrong shape"),
    "a graph that does not exist": (with_value(graph=99), "unknown tensor or graph"),
    "draws that the graph does not have": (with_value(draws=[1, 2]), "does not fit"),
    "a constant that does not exist": (with_value(constants=[7]), "does not fit"),
    "a tensor that does not exist": (
        lambda d: d["values"].update(unknown=d["values"]["table"]),
        "unknown tensor or graph",
    ),
    "a tensor of another shape": (
        lambda d: d["values"].update(table=d["values"]["embedding.weight"]),
        "does not fit",
    ),
    "constants without their file": (lambda d: d.update(constants=[]), "constants"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_breaks_a_rule_is_rejected(
    name: str, original: Package, tmp_path: Path
) -> None:
    change, problem = CHANGES[name]
    package = changed(original, tmp_path / "changed.tl", change)
    with pytest.raises(PackageError) as caught:
        read_initialization(package.path, package.manifest)
    assert problem in str(caught.value)
    assert "initialization" in str(caught.value)


def test_the_original_is_read(original: Package) -> None:
    found = read_initialization(original.path, original.manifest)
    assert found is not None
    assert found.values.keys() == {"embedding.weight", "table", "given"}
    assert found.missing == {}


def test_what_was_written_is_what_is_read(original: Package, tmp_path: Path) -> None:
    again = changed(original, tmp_path / "same.tl", lambda document: None)
    assert again.digest == original.digest


def test_a_package_without_its_feature_is_rejected(original: Package, tmp_path: Path) -> None:
    path = tmp_path / "changed.tl"
    shutil.copytree(original.path, path)
    edit_manifest(path, lambda manifest: manifest["features"].remove("initialization"))
    with pytest.raises(PackageError, match="the feature initialization requires"):
        trainload.open(path)


def test_a_graph_that_needs_too_much_memory_is_rejected(
    original: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainload.packaging.initialization.initial_file.WHOLE_LIMIT", 10)
    with pytest.raises(PackageError, match="too much memory"):
        read_initialization(original.path, original.manifest)


def test_two_freezes_of_one_job_give_the_same_package(original: Package, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = trainload.freeze(job, tmp_path / "first.tl")
    torch.manual_seed(0)
    second = trainload.freeze(job, tmp_path / "second.tl")
    assert first.digest == second.digest
    assert first.manifest.program_digest == original.manifest.program_digest
