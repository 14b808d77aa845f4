"""Packages that say where weights are found, and which names these have there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.launch.run.token_jobs import job_of, losses, write_tokens
from torch import Tensor, nn

import trainload
from trainload.cli import main as cli
from trainload.core.errors import JobError, PackageError, StorageError, WeightsError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import WeightSourceEntry
from trainload.packaging.package import Package

SMALL, LARGE = 8, 12


class Inner(nn.Module):
    """A tied pair of matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = self.embedding(x)
        for layer in self.layers:
            found = layer(found)
        logits: Tensor = self.head(found)
        return logits


class Wrapped(nn.Module):
    """A wrapper that a job adds around a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = Inner(width)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


def seeded(kind: type[nn.Module], width: int = SMALL, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind(width)


def there(name: str) -> str:
    """Return a name as another library spells it."""
    return name.replace("layers.", "blocks/").replace("head.weight", "embedding.weight")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    return write_tokens(path, rows=64, tokens=SMALL)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another seed, under other names."""
    return saved(tmp_path_factory.mktemp("weights") / "other.safetensors", SMALL)


def saved(path: Path, width: int) -> Path:
    state = seeded(Inner, width, seed=1).state_dict()
    save_file({there(name): value.clone() for name, value in state.items()}, path)
    return path


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected")
    package = trainload.freeze(job_of(seeded(Inner, seed=1)), folder / "job.tl")
    return losses(package, data, folder / "run")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Package:
    job = replace(job_of(seeded(Inner)), weight_names=there)
    return trainload.freeze(job, tmp_path_factory.mktemp("named") / "job.tl")


def test_weights_of_other_names_are_read(
    named: Package, data: Path, file: Path, tmp_path: Path, expected: list[float]
) -> None:
    assert losses(named, data, tmp_path / "run", weights_from=file) == expected


def test_names_may_be_a_dict(
    data: Path, file: Path, tmp_path: Path, expected: list[float], named: Package
) -> None:
    names = {
        name: there(name) for name in seeded(Inner).state_dict() if not name.startswith("embed")
    }
    job = replace(job_of(seeded(Inner)), weight_names=names)
    package = trainload.freeze(job, tmp_path / "job.tl")
    assert package.digest == named.digest


def test_names_do_not_belong_to_the_program(named: Package, tmp_path: Path) -> None:
    plain = trainload.freeze(job_of(seeded(Inner)), tmp_path / "job.tl")
    assert plain.manifest.program_digest == named.manifest.program_digest
    assert plain.digest != named.digest


def test_a_trained_package_keeps_the_names(
    named: Package, data: Path, file: Path, tmp_path: Path
) -> None:
    losses(named, data, tmp_path / "run", output=tmp_path / "trained.tl")
    losses(trainload.open(tmp_path / "trained.tl"), data, tmp_path / "next", weights_from=file)


@pytest.mark.matrix("teacher.student.")
@pytest.mark.parametrize("prefix", ["", "module.", "teacher.student."])
def test_the_package_may_have_the_prefix(
    data: Path, tmp_path: Path, expected: list[float], prefix: str
) -> None:
    package = trainload.freeze(job_of(seeded(Wrapped)), tmp_path / "job.tl")
    state = seeded(Inner, seed=1).state_dict()
    path = tmp_path / "weights.safetensors"
    save_file({f"{prefix}{name}": value.clone() for name, value in state.items()}, path)
    assert losses(package, data, tmp_path / "run", weights_from=path) == expected


def test_what_lacks_the_package_s_prefix_is_told_by_its_name_there(
    data: Path, tmp_path: Path
) -> None:
    package = trainload.freeze(job_of(seeded(Wrapped)), tmp_path / "job.tl")
    state = seeded(Inner, seed=1).state_dict()
    state["layers.0.extra"] = state.pop("layers.0.bias")
    path = tmp_path / "weights.safetensors"
    save_file({name: value.clone() for name, value in state.items()}, path)
    with pytest.raises(WeightsError) as told:
        losses(package, data, tmp_path / "run", weights_from=path)
    assert "missing     model.layers.0.bias" in str(told.value)
    assert "unexpected  layers.0.extra" in str(told.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"layers.9.weight": "x"}, "no parameter or buffer.*layers.9.weight"),
        (lambda name: None, "no text.*None"),
        (lambda name: "", "no text"),
        (lambda name: "same", "several parameters have the same name"),
        ({"layers.0.bias": "layers.1.bias"}, "several parameters have the same name"),
    ],
)
def test_names_that_cannot_be_are_refused(names: Any, said: str, tmp_path: Path) -> None:
    job = replace(job_of(seeded(Inner)), weight_names=names)
    with pytest.raises(JobError, match=said):
        trainload.freeze(job, tmp_path / "job.tl")
    assert not (tmp_path / "job.tl").exists()


def big() -> trainload.Job:
    return replace(job_of(Inner(LARGE)), weight_names=there)


def reduced() -> trainload.Job:
    return job_of(seeded(Inner))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("large") / "large.safetensors", LARGE)


@pytest.fixture(scope="module")
def abstract(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """An abstract package that names its weights."""
    path = tmp_path_factory.mktemp("abstract") / "job.tl"
    return trainload.freeze(big, path, abstract=True, reduced=reduced, weights_from=source)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    package = trainload.freeze(job_of(seeded(Inner, LARGE, seed=1)), folder / "job.tl")
    return losses(package, data, folder / "run")


def test_a_launch_without_a_source_takes_the_package_s(
    abstract: Package, data: Path, tmp_path: Path, whole: list[float], source: Path
) -> None:
    assert losses(abstract, data, tmp_path / "run", output=tmp_path / "out.tl") == whole
    trained = trainload.open(tmp_path / "out.tl").manifest
    assert trained.training is not None
    assert trained.training.weights is not None
    assert (trained.training.weights.kind, trained.training.weights.source) == (
        "files",
        source.name,
    )
    assert trained.weight_source is not None
    assert trained.weight_source.default is None


def test_another_source_goes_before_the_package_s(
    abstract: Package, data: Path, tmp_path: Path, whole: list[float]
) -> None:
    assert losses(abstract, data, tmp_path / "run", weights_from="init") != whole


def test_it_is_filled_from_its_source(abstract: Package, tmp_path: Path) -> None:
    filled = trainload.fill(abstract, None, tmp_path / "filled.tl")
    state = seeded(Inner, LARGE, seed=1).state_dict()
    assert all(torch.equal(filled.weights.tensor(n), state[n]) for n in filled.weights.names())


def test_a_source_that_is_gone_is_told_before_anything_starts(
    abstract: Package, data: Path, tmp_path: Path
) -> None:
    manifest = abstract.manifest
    assert manifest.weight_source is not None
    gone = replace_source(abstract, tmp_path / "gone.tl", f"{tmp_path}/gone.safetensors")
    with pytest.raises(trainload.TrainloadError, match=r"gone\.safetensors"):
        losses(gone, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def replace_source(package: Package, path: Path, default: str) -> Package:

    shutil.copytree(package.path, path)
    entry = WeightSourceEntry(default=default, names={})
    manifest = package.manifest.model_copy(update={"weight_source": entry})
    (path / "manifest.json").write_bytes(manifest.to_bytes())
    return trainload.open(path)


def test_the_commands_freeze_and_show_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{__file__}:"
    words = ["freeze", f"{place}big", "--abstract", "--reduced", f"{place}reduced"]
    assert cli.run([*words, "--weights", str(source), "-o", str(tmp_path / "job.tl")]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", str(tmp_path / "job.tl")]) == 0
    assert "other weights" in (shown := capsys.readouterr().out)
    assert source.name in shown.replace("\n", "").replace(" ", "")


def test_a_package_with_weights_names_no_source(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="a package with weights needs no source"):
        trainload.freeze(reduced, tmp_path / "job.tl", weights_from="init")


def with_source(
    entry: WeightSourceEntry | None, *, feature: bool = True
) -> Callable[..., Manifest]:
    def change(manifest: Manifest) -> Manifest:
        features = {*manifest.features, "weight-source"} - (set() if feature else {"weight-source"})
        changes = {"weight_source": entry, "features": tuple(sorted(features))}
        return manifest.model_copy(update=changes)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_source(None), "the feature weight-source requires"),
        (with_source(WeightSourceEntry(default=None, names={}), feature=False), "requires"),
        (
            with_source(WeightSourceEntry(default=None, names={"x": "y"})),
            "a name of weights is that of no parameter",
        ),
        (
            with_source(WeightSourceEntry(default="init", names={})),
            "a package with weights names a source",
        ),
    ],
)
def test_a_manifest_with_another_source_is_refused(
    named: Package, change: Callable[[Manifest], Manifest], said: str
) -> None:
    with pytest.raises(PackageError, match=said):
        Manifest.from_bytes(change(named.manifest).to_bytes(), "manifest.json")


def test_credentials_of_a_source_are_refused(abstract: Package) -> None:
    entry = WeightSourceEntry(default="s3://key:secret@bucket/x", names={})
    manifest = with_source(entry)(abstract.manifest)
    with pytest.raises(StorageError, match="credentials"):
        Manifest.from_bytes(manifest.to_bytes(), "manifest.json")
