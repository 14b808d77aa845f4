"""Runs that begin from weights of elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.launch.commands import contents
from tests.launch.run.token_jobs import job_of, losses, write_tokens
from tests.laws.runs import TOLERANCE, Run, curve, difference, train
from tests.packaging.places import BUCKET, KEYS, s3_server
from tests.packaging.signers import Signers
from tests.shared import frozen_once
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PolicyError, RequestError, WeightsError
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package

Batch = dict[str, Tensor]
SMALL, LARGE = 8, 12


class Model(nn.Module):
    """A tied pair of matrices, a buffer that is saved, and one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.embedding(x)) * self.scale)
        return found


class Plain(nn.Module):
    """A model whose files have all of its values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = functional.one_hot(x, self.width).float()
        for layer in self.layers:
            found = layer(found)
        return found


def model_of(kind: type[nn.Module], width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind(width)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen_once(tmp_path_factory, "given", lambda: job_of(model_of(Model, SMALL, 0)))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The same job with other weights."""
    return frozen_once(tmp_path_factory, "given-other", lambda: job_of(model_of(Model, SMALL, 1)))


@pytest.fixture(scope="module")
def abstract(tmp_path_factory: pytest.TempPathFactory) -> Package:
    with torch.device("meta"):
        job = job_of(Plain(LARGE))
    path = tmp_path_factory.mktemp("abstract") / "job.tl"
    return trainload.freeze(job, path, abstract=True, reduced=job_of(model_of(Plain, SMALL, 0)))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The abstract package's job with values."""
    return frozen_once(tmp_path_factory, "given-large", lambda: job_of(model_of(Plain, LARGE, 1)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    return write_tokens(path, rows=64, tokens=SMALL)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the other weights as from Hugging Face: one of the tied names alone."""
    folder = tmp_path_factory.mktemp("weights")
    state = dict(model_of(Model, SMALL, 1).state_dict())
    state.pop("embedding.weight")
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(other: Package, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(other, data, tmp_path_factory.mktemp("expected") / "run")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves
@pytest.mark.parametrize(
    "source", ["a folder", "a file", "a package", "a release", "a torch checkpoint"]
)
def test_a_run_has_the_losses_of_a_package_with_these_weights(
    source: str,
    package: Package,
    other: Package,
    data: Path,
    weights: Path,
    expected: list[float],
    tmp_path: Path,
) -> None:
    if source == "a release":
        trainload.push(other.path, tmp_path / "store", line="other")
    if source == "a torch checkpoint":
        state = {"model": model_of(Model, SMALL, 1).state_dict(), "step": 5}
        save(state, checkpoint_id=tmp_path / "saved")
    where = {
        "a folder": weights,
        "a file": weights / "model.safetensors",
        "a package": other.path,
        "a release": f"{tmp_path / 'store'}#other",
        "a torch checkpoint": tmp_path / "saved",
    }[source]
    assert losses(package, data, tmp_path / "run", weights_from=where) == expected


def test_weights_in_s3_are_read_by_ranges(
    package: Package,
    data: Path,
    weights: Path,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs

    with s3_server() as url:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        where = f"s3://{BUCKET}/weights"
        s3fs.S3FileSystem().put(f"{weights}/", f"{BUCKET}/weights/", recursive=True)
        assert losses(package, data, tmp_path / "run", weights_from=where) == expected
        s3fs.S3FileSystem.clear_instance_cache()


def test_weights_of_fewer_bits_are_converted_exactly(
    package: Package, data: Path, tmp_path: Path
) -> None:
    state = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in model_of(Model, SMALL, 1).state_dict().items()
        if name != "embedding.weight"
    }
    save_file(state, tmp_path / "narrow.safetensors")
    wide = {
        name: value.float() if value.is_floating_point() else value for name, value in state.items()
    }
    save_file(wide, tmp_path / "wide.safetensors")
    narrow = losses(
        package, data, tmp_path / "narrow", weights_from=tmp_path / "narrow.safetensors"
    )
    assert narrow == losses(
        package, data, tmp_path / "wide", weights_from=tmp_path / "wide.safetensors"
    )


def test_an_abstract_package_trains_as_one_with_these_weights(
    abstract: Package, large: Package, data: Path, tmp_path: Path
) -> None:
    found = losses(
        abstract, data, tmp_path / "run", weights_from=large.path, output=tmp_path / "trained.tl"
    )
    assert found == losses(large, data, tmp_path / "expected", output=tmp_path / "expected.tl")
    trained, wanted = (trainload.open(tmp_path / f"{name}.tl") for name in ("trained", "expected"))
    assert trained.manifest.abstract is None
    for name in wanted.weights.names():
        assert torch.equal(trained.weights.tensor(name), wanted.weights.tensor(name))


PLANS: dict[str, tuple[str, dict[str, int]]] = {
    "zero3": ("zero3", {}),
    "tensor": ("zero0", {"tensor_ranks": 2}),
    "pipeline": ("zero0", {"pipeline_ranks": 2, "accumulate": 2}),
}


@pytest.fixture(scope="module")
def divided(
    abstract: Package, large: Package, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Runs of the abstract package on two ranks, in folders by the names of their plans."""
    folder = tmp_path_factory.mktemp("divided")
    source = folder / "w.safetensors"
    save_file({n: large.weights.tensor(n) for n in large.weights.names()}, source)
    options = {"weights_from": str(source), "compile": False}
    cluster = trainload.Cluster(devices_per_node=2)
    runs = [
        Run(
            folder / name,
            abstract,
            trainload.plan(abstract, cluster, strategy, **more),  # type: ignore[arg-type]
            data,
            options,
        )
        for name, (strategy, more) in PLANS.items()
    ]
    train(2, runs, folder)
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_divide_it_have_the_losses_of_one(
    plan: str, divided: Path, large: Package, data: Path, tmp_path: Path
) -> None:
    found = curve(divided / plan)
    assert difference(found, losses(large, data, tmp_path / "whole")) < TOLERANCE


@pytest.mark.parametrize("plan", ["zero3", "pipeline"])
def test_together_they_read_each_byte_once(plan: str, divided: Path, large: Package) -> None:
    read = [e.data["bytes"] for e in read_events(divided / plan) if e.kind == "weights"]
    assert len(read) == 2
    assert sum(read) == sum(large.weights.tensor(n).nbytes for n in large.weights.names())


def test_a_run_of_it_is_continued_without_the_source(
    abstract: Package, large: Package, data: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source.safetensors"
    save_file({n: large.weights.tensor(n) for n in large.weights.names()}, source)
    losses(abstract, data, tmp_path / "run", weights_from=source, steps=2)
    source.unlink()
    trainload.resume(tmp_path / "run", backend="local", steps=4)
    found = [event.data["loss"] for event in read_events(tmp_path / "run") if event.kind == "step"]
    assert found == losses(large, data, tmp_path / "whole", steps=4)


def test_it_is_evaluated(abstract: Package, large: Package, data: Path) -> None:
    plan = trainload.plan(abstract, trainload.Cluster(), "single")
    own = trainload.plan(large, trainload.Cluster(), "single")
    options: dict[str, Any] = {"backend": "local", "compile": False}
    found = trainload.evaluate(abstract, plan, data, weights_from=large.path, **options)
    assert found.loss == trainload.evaluate(large, own, data, **options).loss


def test_without_weights_the_error_says_how_to_pass_them(
    abstract: Package, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(trainload.TrainloadError, match="--weights FOLDER"):
        losses(abstract, data, tmp_path / "run")


CHANGES = {
    "precision": trainload.Overrides(precision="bf16"),
    "adapters": trainload.Overrides(adapters=trainload.Adapters(rank=2, layers=("*.weight",))),
    "both": trainload.Overrides(
        precision="bf16", adapters=trainload.Adapters(rank=2, layers=("*.weight",))
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("precision", marks=pytest.mark.slow),
        pytest.param("adapters", marks=pytest.mark.slow),
        "both",
    ],
)
def test_its_graphs_are_changed_at_the_launch_like_those_of_one_with_weights(
    name: str, abstract: Package, large: Package, data: Path, tmp_path: Path
) -> None:
    overrides = CHANGES[name]

    def trained(of: Package, place: str, **options: Any) -> list[float]:
        plan = trainload.plan(overrides.apply(of), trainload.Cluster(), "single")
        trainload.launch(
            of,
            plan,
            data,
            run_dir=tmp_path / place,
            backend="local",
            compile=False,
            overrides=overrides,
            output=tmp_path / f"{place}.tl",
            **options,
        )
        return [e.data["loss"] for e in read_events(tmp_path / place) if e.kind == "step"]

    filled = trainload.fill(abstract, large.path, tmp_path / "whole.tl")
    found = trained(abstract, "given", weights_from=large.path)
    assert found == trained(filled, "filled")
    mine, its = (trainload.open(tmp_path / f"{each}.tl") for each in ("given", "filled"))
    assert mine.manifest.abstract is None
    for each in its.weights.names():
        assert torch.equal(mine.weights.tensor(each), its.weights.tensor(each))


def test_a_run_with_adapters_of_it_is_continued(
    abstract: Package, large: Package, data: Path, tmp_path: Path
) -> None:
    overrides = CHANGES["adapters"]

    def trained(place: str, **options: Any) -> list[float]:
        plan = trainload.plan(overrides.apply(abstract), trainload.Cluster(), "single")
        trainload.launch(
            abstract,
            plan,
            data,
            run_dir=tmp_path / place,
            backend="local",
            compile=False,
            overrides=overrides,
            weights_from=large.path,
            **options,
        )
        if options["steps"] < 4:
            trainload.resume(tmp_path / place, backend="local", steps=4)
        return [e.data["loss"] for e in read_events(tmp_path / place) if e.kind == "step"]

    assert trained("parts", steps=2) == trained("whole", steps=4)


def test_adapters_are_beside_given_weights(large: Package, data: Path, tmp_path: Path) -> None:
    overrides = trainload.Overrides(adapters=trainload.Adapters(rank=2, layers=("*.weight",)))
    save_file(dict(model_of(Plain, LARGE, 2).state_dict()), tmp_path / "w.safetensors")
    filled = trainload.fill(large, tmp_path / "w.safetensors", tmp_path / "filled.tl")

    def found(of: Package, name: str, **options: Any) -> list[float]:
        plan = trainload.plan(overrides.apply(of), trainload.Cluster(), "single")
        trainload.launch(
            of,
            plan,
            data,
            run_dir=tmp_path / name,
            backend="local",
            compile=False,
            overrides=overrides,
            **options,
        )
        return [e.data["loss"] for e in read_events(tmp_path / name) if e.kind == "step"]

    given = found(large, "given", weights_from=tmp_path / "w.safetensors")
    assert given == found(filled, "own")


def test_the_journal_says_what_each_rank_has_read(
    package: Package, data: Path, weights: Path, tmp_path: Path
) -> None:
    losses(package, data, tmp_path / "run", weights_from=weights)
    (event,) = [event for event in read_events(tmp_path / "run") if event.kind == "weights"]
    sizes = [spec.nbytes for spec in read_spec_tensors(weights)]
    assert (event.data["rank"], event.data["source"]) == (0, str(weights))
    assert event.data["bytes"] == sum(sizes)
    losses(package, data, tmp_path / "again", weights_from=weights)
    (again,) = [event for event in read_events(tmp_path / "again") if event.kind == "weights"]
    assert again.data == event.data


def read_spec_tensors(weights: Path) -> list[Any]:
    from trainload.packaging.weight_sources.safetensors_source import SafetensorsSource

    return list(SafetensorsSource(weights).tensors.values())


def test_the_run_records_the_files(
    package: Package, data: Path, weights: Path, tmp_path: Path
) -> None:
    losses(package, data, tmp_path / "run", weights_from=weights)
    given = read_spec(tmp_path / "run").given
    assert given is not None
    assert [file.name for file in given.files] == ["model.safetensors"]
    assert given.names["embedding.weight"] == "head.weight"
    assert "scale" not in given.names


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("norm", "layer_norm"): value for name, value in state.items()}


def without_norm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "norm.weight"}


def with_more(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, **{f"layers.{n}.extra": torch.zeros(2) for n in range(3)}}


def in_double(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "norm.weight": state["norm.weight"].double()}


def transposed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "head.weight": state["head.weight"].T.contiguous()}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], list[str]]] = {
    "a tensor is missing": (without_norm, ["missing     norm.weight  float32 (8)"]),
    "tensors are unexpected": (
        with_more,
        ["unexpected  layers.*.extra (3 tensors)  float32 (2)"],
    ),
    "a conversion is not exact": (
        in_double,
        ["dtype       norm.weight  float32 (8), found float64 (8)"],
    ),
    "a shape is another": (
        transposed,
        ["shape       embedding.weight  float32 (16, 8), found float32 (8, 16)"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_are_told_in_a_table(
    case: str, package: Package, data: Path, weights: Path, tmp_path: Path
) -> None:
    change, table = MISFITS[case]
    save_file(change(load_file(weights / "model.safetensors")), tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="do not fit the package") as caught:
        losses(package, data, tmp_path / "run", weights_from=tmp_path / "w.safetensors")
    assert list(caught.value.table) == table
    assert not (tmp_path / "run").exists()


def test_tied_parameters_that_differ_in_the_source_are_told(
    package: Package, weights: Path, tmp_path: Path
) -> None:
    state = load_file(weights / "model.safetensors")
    for name, other in (("same", state["head.weight"]), ("other", state["head.weight"] + 1)):
        save_file({**state, "embedding.weight": other.clone()}, tmp_path / f"{name}.safetensors")
    trainload.fill(package, tmp_path / "same.safetensors", tmp_path / "same.tl")
    with pytest.raises(WeightsError) as caught:
        trainload.fill(package, tmp_path / "other.safetensors", tmp_path / "other.tl")
    (line,) = caught.value.table
    assert "embedding.weight and head.weight differ" in line


def test_a_buffer_that_is_not_saved_keeps_its_value_if_the_source_has_another(
    package: Package, weights: Path, tmp_path: Path
) -> None:
    state = load_file(weights / "model.safetensors")
    save_file({**state, "scale": torch.ones(3)}, tmp_path / "w.safetensors")
    filled = trainload.fill(package, tmp_path / "w.safetensors", tmp_path / "filled.tl")
    assert torch.equal(filled.weights.tensor("scale"), package.weights.tensor("scale"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves
def test_what_a_training_saves_beside_a_model_is_not_read(
    package: Package, weights: Path, tmp_path: Path
) -> None:
    """The layout is torchtitan's: the model is at the root of the checkpoint."""
    state = load_file(weights / "model.safetensors")
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in state.items()}
    save({**state, **moments, "train_state": {"step": 3}}, checkpoint_id=tmp_path / "saved")
    filled = trainload.fill(package, tmp_path / "saved", tmp_path / "filled.tl")
    assert torch.equal(filled.weights.tensor("embedding.weight"), state["head.weight"])


@pytest.mark.parametrize("prefix", ["model.", "module."])
def test_names_may_have_a_prefix(
    prefix: str, package: Package, weights: Path, tmp_path: Path
) -> None:
    """One tensor without the prefix has the name of a buffer."""
    state = load_file(weights / "model.safetensors")
    given = {**{prefix + name: value for name, value in state.items()}, "scale": torch.ones(2)}
    save_file(given, tmp_path / "w.safetensors")
    filled = trainload.fill(package, tmp_path / "w.safetensors", tmp_path / "filled.tl")
    assert torch.equal(filled.weights.tensor("norm.weight"), state["norm.weight"])


def test_two_models_in_one_source_are_told(package: Package, weights: Path, tmp_path: Path) -> None:
    state = load_file(weights / "model.safetensors")
    both = {
        f"{of}.{name}": value.clone() for of in ("ema", "model") for name, value in state.items()
    }
    save_file(both, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"several models .*got ema\., model\."):
        trainload.fill(package, tmp_path / "w.safetensors", tmp_path / "filled.tl")


def test_links_to_files_are_followed(
    package: Package, other: Package, weights: Path, tmp_path: Path
) -> None:
    """The cache of Hugging Face consists of such links."""
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(weights / "model.safetensors")
    filled = trainload.fill(package, tmp_path / "snapshot", tmp_path / "filled.tl")
    assert trainload.diff(filled.path, other.path).weights == ()


def test_partial_weights_need_a_source(package: Package, data: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no effect without a source"):
        losses(package, data, tmp_path / "run", partial_weights=True)


def test_a_state_of_an_optimizer_does_not_belong_to_given_weights(
    package: Package, data: Path, weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="belongs to the weights of its run"):
        losses(
            package, data, tmp_path / "run", weights_from=weights, optimizer_from=tmp_path / "other"
        )


@pytest.mark.parametrize("source", ["a folder", "a package"])
def test_a_policy_that_requires_signatures_holds_for_weights_too(
    source: str,
    package: Package,
    other: Package,
    weights: Path,
    signers: Signers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'require_signature = true\nidentities = ["{signers.alice.public}"]\n')
    monkeypatch.setenv("TRAINLOAD_POLICY", str(policy))
    where = weights if source == "a folder" else other.path
    with pytest.raises(PolicyError, match="sign"):
        trainload.fill(package, where, tmp_path / "filled.tl")


def test_partial_weights_leave_the_others_as_they_are(
    package: Package, data: Path, weights: Path, tmp_path: Path
) -> None:
    own = {name: package.weights.tensor(name) for name in package.weights.names()}
    given = with_more(without_norm(load_file(weights / "model.safetensors")))
    save_file(given, tmp_path / "w.safetensors")
    filled = trainload.fill(
        package, tmp_path / "w.safetensors", tmp_path / "filled.tl", partial=True
    )
    assert torch.equal(filled.weights.tensor("norm.weight"), own["norm.weight"])
    assert torch.equal(filled.weights.tensor("embedding.weight"), given["head.weight"])


def test_weights_of_other_names_do_not_fit_even_in_part(
    abstract: Package, package: Package, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match="may be missing") as caught:
        trainload.fill(abstract, package.path, tmp_path / "filled.tl", partial=True)
    assert [line.split()[0] for line in caught.value.table] == ["missing", "missing"]


def test_the_command_writes_a_filled_package(
    abstract: Package, large: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "filled.tl"
    arguments = ["fill", str(abstract.path), "--weights", str(large.path), "-o", str(made)]
    assert cli.run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == trainload.open(made).digest
    assert trainload.open(made).manifest.parent == abstract.digest
    assert trainload.diff(made, large.path).weights == ()


def test_the_command_refuses_weights_that_do_not_fit(
    package: Package,
    large: Package,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["launch", package.path, "--data", data, "--backend", "local"]
    assert cli.run([str(part) for part in [*arguments, "--weights", large.path]]) == 2
    first, *table = capsys.readouterr().err.splitlines()
    assert first.startswith(f"trainload: {large.path}: the weights do not fit the package")
    assert {line.split()[0] for line in table} == {"missing", "unexpected"}
    assert not contents(tmp_path)
