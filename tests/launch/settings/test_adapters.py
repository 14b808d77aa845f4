"""Low-rank adapters of a frozen package train as those that are put into the model by hand, and
leave everything else as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.golden.goldens import goldens
from tests.launch import graph_jobs
from tests.launch.optimizer_jobs import STEPS, Model, adam, eager, frozen, make_job, write_data
from tests.laws.runs import TOLERANCE, Run, curve, difference, train
from tests.selection import selected
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainload
from trainload.cli import main as cli
from trainload.core.errors import JobError, PackageError, PlanError
from trainload.launching.node.build import build_key
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.settings.adapter_weights import first_values
from trainload.launching.settings.adapters import Adapters
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package

LAYERS = ("second.weight", "third.weight", "last.weight")
ADAPTERS = Adapters(rank=3, layers=("*d.weight", "last.weight"), alpha=6.0)
WITH_NORM = ADAPTERS.model_copy(update={"also": ("norm.*",)})
TWO = trainload.Cluster(devices_per_node=2)
Capture = pytest.CaptureFixture[str]


class ByHand(nn.Module):
    """A linear layer with an adapter, as anyone would write it."""

    def __init__(self, layer: nn.Linear, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up, self.scale = nn.Parameter(down), nn.Parameter(up), scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.scale * functional.linear(
            functional.linear(x, self.down), self.up
        )
        return out

    def merged(self) -> Tensor:
        return self.layer.weight.detach() + self.scale * (self.up @ self.down).detach()


class Regions(Model):
    """The same layers, some under autocast, some in a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            out: Tensor = self.third(torch.tanh(self.second(self.norm(x))))
            return out

        x = torch.tanh(self.first(x))
        hidden: Tensor = checkpoint(inner, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            out: Tensor = self.last(x + functional.gelu(hidden))
        return out


def by_hand(
    job: trainload.Job, package: Package, adapters: Adapters, seed: int | None = None
) -> trainload.Job:
    """The job with adapters in its model; all else is frozen but for what the adapters name."""
    chosen = adapters.chosen(package.manifest)
    values = first_values(chosen, package.manifest, package.recipe.seed if seed is None else seed)
    kept = adapters.trained_beside(package.manifest)
    for name, parameter in job.model.named_parameters():
        parameter.requires_grad_(name in kept)
    for each in chosen:
        name = each.weight.removesuffix(".weight")
        layer: Any = job.model.get_submodule(name)
        job.model.set_submodule(name, ByHand(layer, values[each.down], values[each.up], each.scale))
    return job


def adam_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return adam(nn.ParameterList(p for p in model.parameters() if p.requires_grad))


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
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one worker."""
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
    """A folder of runs on two workers."""
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


def test_the_tensor_axis_divides_adapters_with_their_layers(package: Package) -> None:
    plan = trainload.plan(
        trainload.Overrides(adapters=ADAPTERS).apply(package), TWO, tensor_ranks=2
    )
    shards = {name: shard.dim for name, shard in plan.tensor_shards.items()}
    assert {"second.weight", "third.weight"} <= shards.keys()
    assert shards["second.weight"] == shards["second.lora_B.weight"] == 0  # out is divided
    assert shards["third.weight"] == shards["third.lora_A.weight"] == 1  # in is divided


def test_the_optimizer_has_state_for_what_is_trained_alone(package: Package) -> None:
    whole = trainload.plan(package, trainload.Cluster(), "single").estimate
    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    few = trainload.plan(changed, trainload.Cluster(), "single").estimate
    trained = [ADAPTERS.rank * side for name in LAYERS for side in package.weights.shape(name)]
    assert few.optimizer_bytes == 2 * 4 * sum(
        -(-length // 16) * 16 for length in trained
    )  # Adam's moments; each begins at a multiple of 16
    assert few.optimizer_bytes < whole.optimizer_bytes / 2
    assert few.gradient_bytes < whole.gradient_bytes / 2


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


def test_a_gradient_of_a_frozen_matrix_is_nowhere_in_the_graph(package: Package) -> None:
    from trainload.sharding.plans.device_step_graphs import step_graphs

    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    step = step_graphs(changed, torch.device("cpu"))["train"]
    shapes = [
        tuple(node.meta["val"].shape)
        for node in step.module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    ]
    computed = [
        n for n in step.module.graph.nodes if n.op == "call_function" and "mm" in str(n.target)
    ]
    assert shapes and all(
        tuple(node.meta["val"].shape) not in [(12, 12), (8, 12)] for node in computed
    )


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_bits(
    package: Package, alone: Path, rows: Path, tmp_path: Path
) -> None:
    launched(package, rows, tmp_path / "run", ADAPTERS, steps=STEPS, checkpoint_every=5)
    for later in (tmp_path / "run" / "checkpoints").glob("step-*12"):
        for file in later.iterdir():
            file.unlink()
        later.rmdir()
    (tmp_path / "run.tl").rename(tmp_path / "before.tl")
    trainload.resume(tmp_path / "run", backend="local")
    assert curve(tmp_path / "run") == curve(alone)
    assert (
        trainload.open(tmp_path / "run.tl").digest == trainload.open(tmp_path / "before.tl").digest
    )


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The job with regions, whose third layer is frozen."""
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


def test_the_changed_package_is_a_sound_one(package: Package) -> None:
    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    assert not verify_package(changed.path).problems
    assert changed.manifest.parent == package.digest
    assert [entry.options["rank"] for entry in changed.manifest.passes] == [3]
    batch = {"x": torch.randn(5, 8), "y": torch.randn(5, 8)}
    (loss,) = changed.graph("eval").module(check_guards=False)(batch)
    (before,) = package.graph("eval").module(check_guards=False)(batch)
    torch.testing.assert_close(loss, before)


def test_the_changed_package_is_made_once(package: Package) -> None:
    overrides = trainload.Overrides(adapters=ADAPTERS)
    first = overrides.apply(package)
    made = (first.path / "manifest.json").stat().st_mtime_ns
    assert trainload.Overrides(adapters=ADAPTERS, lr=0.1).apply(package).path == first.path
    assert (overrides.apply(package).path / "manifest.json").stat().st_mtime_ns == made


@pytest.mark.slow
def test_its_bytes_follow_from_the_package_and_the_seed(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = trainload.Overrides(adapters=ADAPTERS).apply(package)
    other = trainload.Overrides(adapters=ADAPTERS, seed=11).apply(package)
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path))
    there = trainload.Overrides(adapters=ADAPTERS).apply(package)
    assert there.path != here.path and there.digest == here.digest
    plan = trainload.plan(here, trainload.Cluster(), "single")
    assert other.digest != here.digest
    # nothing is compiled again
    assert build_key(other, plan, torch.device("cpu")) == build_key(here, plan, torch.device("cpu"))


@pytest.mark.slow
def test_one_that_was_damaged_is_made_again(package: Package) -> None:
    adapters = trainload.Overrides(adapters=ADAPTERS.model_copy(update={"rank": 2}))
    made = adapters.apply(package)
    (made.path / "manifest.json").write_bytes(b"{}")
    assert adapters.apply(package).digest == made.digest


def test_adapters_begin_within_kaiming_s_bound(package: Package) -> None:
    values = first_values(ADAPTERS.chosen(package.manifest), package.manifest, 3)
    for name in ("second", "third", "last"):
        down, up = values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"]
        bound = nn.init.calculate_gain("leaky_relu", 5**0.5) * 3**0.5 / down.shape[1] ** 0.5
        assert not up.any()
        assert 0.5 * bound < down.abs().max() <= bound and down.min() < 0 < down.max()
    assert not torch.equal(values["second.lora_A.weight"], values["third.lora_A.weight"])


class Strange(Model):
    """Its layers' weights are used in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.unused = nn.Linear(8, 8)
        self.still = nn.Linear(8, 8)
        self.tied = nn.Linear(12, 8, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.still(x)
        penalty = self.second.weight.square().mean()
        out: Tensor = super().forward(x + self.table.weight.sum(0)) + penalty + still.detach()
        return out


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Package:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return adam(
            nn.ParameterList(
                p
                for name, p in model.named_parameters()
                if not name.startswith(("unused", "still"))
            )
        )

    with pytest.warns(UserWarning, match="4 parameters get no gradient"):
        return trainload.freeze(
            make_job(optimizer, Strange), tmp_path_factory.mktemp("strange") / "job.tl"
        )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"layers": ("secnd.weight",)},
            r"no parameter matches 'secnd.weight' \(expected second.weight",
        ),
        (
            {"layers": ("first.*",)},
            r"first.bias is not the weight of a linear layer .*got shape \(12,\)",
        ),
        (
            {"layers": ("table.weight",)},
            r"not only used as the weight of a linear layer .*got aten.sum.dim_IntList at File",
        ),
        (
            {"layers": ("second.weight",)},
            (
                r"not only used as the weight of a linear layer .*got aten.square.default at File"
                r" .*line \d+, in forward"
            ),
        ),
        ({"layers": ("last.weight",)}, "last.weight and tied.weight are the same parameter"),
        ({"layers": ("unused.weight",)}, "no training graph uses unused.weight"),
        ({"layers": ("still.weight",)}, "still.lora_A.weight gets no gradient from graph train"),
        (
            {"layers": ("third.weight",), "rank": 13},
            (
                r"adapters.rank: the rank is greater than that of a layer \(expected at most 12,"
                r" .*got 13\)"
            ),
        ),
        (
            {"layers": ("third.weight",), "also": ("nrm.weight",)},
            r"no trained parameter matches 'nrm.weight' \(expected norm.weight",
        ),
        (
            {"layers": ("third.weight",), "also": ("third.*",)},
            "is selected for an adapter and for training",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    strange: Package, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(JobError, match=line):
        trainload.Overrides(adapters=Adapters(**{"rank": 2, **options})).apply(strange)


@pytest.mark.slow
def test_an_update_of_whole_parameters_is_none_for_adapters(tmp_path: Path) -> None:
    # of two graphs, one of which Muon updates
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


def test_a_graph_that_would_train_nothing_is_refused() -> None:
    golden = next(each for each in goldens() if each.name == "turns")
    overrides = trainload.Overrides(adapters=Adapters(rank=1, layers=("judge.0.weight",)))
    with pytest.raises(JobError, match="graph generator would have no trained parameters"):
        overrides.apply(trainload.open(golden.package))


def test_a_plan_for_the_frozen_package_is_refused(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with pytest.raises(
        PlanError, match="for the unmodified package, but this run changes the package's graphs"
    ):
        trainload.launch(
            package,
            plan,
            rows,
            run_dir=tmp_path / "run",
            backend="local",
            overrides=trainload.Overrides(adapters=ADAPTERS),
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


def test_an_abstract_package_is_refused() -> None:
    abstract = next(each for each in goldens() if each.name == "shapes")
    with pytest.raises(PackageError, match="this package is abstract"):
        trainload.Overrides(adapters=ADAPTERS).apply(trainload.open(abstract.package))


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
