"""`trainload.export`: exports run without trainload, and compute the same results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from tests.capture.regions import MODELS
from tests.export.jobs import Found, Small, model_of, opened_elsewhere, own_results, predict
from tests.golden.goldens import Golden, goldens
from tests.laws.isolated import Environment
from torch import Tensor, nn
from torch.export import Dim

import trainload
from trainload.autograd_trace.derivation.plain import own_operators
from trainload.cli import main as cli
from trainload.core.errors import ClusterError, IntegrityError, PackageError, StorageError
from trainload.exporting import export_graphs as exporting
from trainload.packaging.package import Package

X = {"x": torch.randn(7, 8, generator=torch.Generator().manual_seed(3))}
ROWS = {**X, "scale": torch.linspace(0.5, 2, 7)[:, None]}
"""A batch with another number of rows than the example, and in another order than the graph's."""
_GENERATOR = torch.Generator().manual_seed(1)
ROWS_OF_EVERYTHING = {
    "x": torch.randint(0, 16, (5, 5), generator=_GENERATOR),
    "y": torch.randint(0, 16, (5,), generator=_GENERATOR),
}


CALLS = 3


@pytest.fixture(scope="module")
def pt2(trained: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainload.export(trained, tmp_path_factory.mktemp("pt2") / "small.pt2", to="pt2").path


@pytest.fixture(scope="module")
def everything(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> exporting.Exported:
    """An export with everything that a graph can contain.

    The graph has tied weights, a frozen weight, both kinds of buffers, a constant, cond, autocast
    to bfloat16 and a no_grad region.
    """
    return trainload.export(
        packaged, tmp_path_factory.mktemp("everything") / "job.pt2", to="pt2", graph="eval"
    )


@pytest.fixture(scope="module")
def elsewhere(
    pt2: Path,
    everything: exporting.Exported,
    outside: Environment,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Found]:
    """Results of both exports in one process that cannot import trainload."""
    exports = [(pt2, ROWS), (everything.path, ROWS_OF_EVERYTHING)]
    return opened_elsewhere(outside, "pt2", exports, tmp_path_factory.mktemp("elsewhere"), CALLS)


@pytest.fixture(scope="module")
def from_pt2(elsewhere: list[Found]) -> Found:
    return elsewhere[0]


@pytest.fixture(scope="module")
def aoti(trained: Package, tmp_path_factory: pytest.TempPathFactory) -> exporting.Exported:
    return trainload.export(trained, tmp_path_factory.mktemp("aoti") / "small.pt2", to="aoti")


@pytest.fixture(scope="module")
def from_aoti(
    aoti: exporting.Exported, outside: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Found:
    (found,) = opened_elsewhere(
        outside, "aoti", [(aoti.path, ROWS)], tmp_path_factory.mktemp("elsewhere"), CALLS
    )
    return found


def assert_close(
    found: Sequence[dict[str, Tensor]],
    expected: Sequence[dict[str, Tensor]],
    tolerance: float = 0.0,
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, rtol=tolerance, atol=tolerance)


def test_plain_torch_opens_a_pt2_and_predicts_what_the_package_does(
    from_pt2: Found, trained: Package
) -> None:
    assert_close(from_pt2.results, own_results(trained, "predict", ROWS, CALLS))


def test_a_pt2_predicts_what_the_trained_eager_model_does(
    from_pt2: Found, trained: Package
) -> None:
    with torch.no_grad():
        assert_close(from_pt2.results[:1], [predict(model_of(trained, Small()), ROWS)], 1e-6)


def test_it_has_the_newest_weights(trained: Package) -> None:
    torch.manual_seed(0)
    assert not torch.equal(trained.weights.tensor("first.weight"), Small().first.weight)


def test_a_pt2_updates_its_buffers_from_call_to_call(from_pt2: Found) -> None:
    assert not torch.equal(from_pt2.results[0]["y"], from_pt2.results[2]["y"])


def test_the_note_in_a_pt2_says_what_goes_in_and_comes_out(
    from_pt2: Found, trained: Package
) -> None:
    note = from_pt2.note
    assert note["inputs"] == [
        {"name": "scale", "dtype": "float32", "shape": ["batch", 1]},
        {"name": "x", "dtype": "float32", "shape": ["batch", 8]},
    ]
    assert [output["name"] for output in note["outputs"]] == ["best", "y"]
    assert (note["package"], note["graph"], note["libraries"]) == (trained.digest, "predict", {})


@pytest.mark.slow
def test_an_aotinductor_package_was_compared_when_it_was_made(aoti: exporting.Exported) -> None:
    assert aoti.difference is not None and aoti.difference <= 1e-4


@pytest.mark.slow
def test_what_is_built_in_passing_is_not_left_behind(aoti: exporting.Exported) -> None:
    assert [path.name for path in aoti.path.parent.iterdir()] == ["small.pt2"]


@pytest.mark.slow
def test_torchs_loader_runs_an_aotinductor_package_which_updates_its_buffers(
    from_aoti: Found, trained: Package
) -> None:
    assert_close(from_aoti.results, own_results(trained, "predict", ROWS, CALLS), 1e-5)
    assert from_aoti.note["package"] == trained.digest


@pytest.mark.slow
def test_an_aotinductor_package_predicts_what_the_trained_eager_model_does(
    from_aoti: Found, trained: Package
) -> None:
    with torch.no_grad():
        assert_close(from_aoti.results[:1], [predict(model_of(trained, Small()), ROWS)], 1e-5)


def test_everything_that_a_graph_holds_comes_out(
    packaged: Package, everything: exporting.Exported, elsewhere: list[Found]
) -> None:
    assert everything.difference == 0.0
    assert_close(elsewhere[1].results, own_results(packaged, "eval", ROWS_OF_EVERYTHING, CALLS))


def gradient_inside(model: Any, x: Tensor) -> Tensor:
    """Compute a gradient with torch.autograd.grad, which evaluation does too."""
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model.part(y).tanh().square().sum(), y, create_graph=True)
    return x + gradient


INSIDE = {
    "autograd.grad": lambda: Model(gradient_inside, part=nn.Linear(8, 8)),
    "func.grad": lambda: Model(
        lambda m, x: x + torch.func.grad(lambda y: m.part(y).tanh().sum())(x), part=nn.Linear(8, 8)
    ),
    "vmap": lambda: Model(
        lambda m, x: torch.func.vmap(lambda row: m.part(row).tanh() * row.sum())(x),
        part=nn.Linear(8, 8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(INSIDE))
def test_operators_of_trainload_are_traced_away(name: str, tmp_path: Path) -> None:
    package = trainload.freeze(
        job(INSIDE[name](), predict=lambda model, batch: model(batch["x"])), tmp_path / "a.tl"
    )
    own = own_operators(package.captured("predict").exported.graph_module)
    assert own
    made = trainload.export(package, tmp_path / "a.pt2", to="pt2")
    assert made.lowered == own
    module = torch.export.load(made.path).module()  # noqa: TID251  # made here
    targets = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not {target for target in targets if "trainload" in target}
    assert_close(
        [dict(zip(made.outputs, module(X), strict=True))], own_results(package, "predict", X), 1e-6
    )


def test_an_operator_that_plain_torch_cannot_say_is_refused_by_its_name(tmp_path: Path) -> None:
    targets, letters = (
        torch.tensor([[1, 2, 3], [2, 2, 1], [4, 3, 1], [1, 1, 2]]),
        torch.tensor([3, 2, 3, 1]),
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).unsqueeze(0).expand(9, -1, -1).log_softmax(-1)
        frames = torch.full_like(batch["letters"], 9)
        return nn.functional.ctc_loss(scores, batch["targets"], frames, batch["letters"])

    batch = {"x": torch.randn(4, 8), "targets": targets, "letters": letters}
    package = trainload.freeze(job(Model(), loss=loss, batch=batch), tmp_path / "ctc.tl")
    with pytest.raises(
        PackageError,
        match=(
            r"graph eval: it calls operators that plain torch does not"
            r" have.*trainload\.ctc_loss\.default"
        ),
    ):
        trainload.export(package, tmp_path / "ctc.pt2", to="pt2", graph="eval")
    assert [path.name for path in tmp_path.iterdir()] == ["ctc.tl"]


def test_conditions_on_sizes_are_checked_by_torch(tmp_path: Path) -> None:
    """The number of values is even and at most 16: the model takes every second one."""
    model = Model(lambda _, x: x[:, ::2] * 2)
    options: dict[str, Any] = {
        "batch": {"x": torch.randn(4, 6, 8)},
        "dynamic": {"x": {1: 2 * Dim("pairs", max=8)}},
    }
    package = trainload.freeze(
        job(model, predict=lambda model, batch: model(batch["x"]), **options), tmp_path / "even.tl"
    )
    path = trainload.export(package, tmp_path / "even.pt2", to="pt2").path
    module = torch.export.load(path).module()  # noqa: TID251  # made here
    assert module({"x": torch.randn(3, 10, 8)})[0].shape == (3, 5, 8)
    for values in (9, 18):
        with pytest.raises(AssertionError, match="Guard failed"):
            module({"x": torch.randn(3, values, 8)})


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A package of two variants, one for longer rows."""

    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x if x.shape[1] == 8 else x.view(-1, 2, 8).mean(1))
            return y

    made = job(
        Means(),
        predict=lambda model, batch: model(batch["x"]),
        variants={"long": {"x": torch.randn(4, 16)}},
    )
    return trainload.freeze(made, tmp_path_factory.mktemp("varied") / "varied.tl")


@pytest.mark.slow  # the next test exports a variant of an existing package
def test_a_variant_is_exported_by_its_name(varied: Package, tmp_path: Path) -> None:
    made = trainload.export(varied, tmp_path / "long.pt2", to="pt2", variant="long")
    assert (made.graph, made.inputs) == ("predict-long", {"x": "float32[batch, 16]"})
    batch = {"x": torch.randn(3, 16)}
    module = torch.export.load(made.path).module()  # noqa: TID251  # made here
    assert_close(
        [dict(zip(made.outputs, module(batch), strict=True))],
        own_results(varied, "predict-long", batch),
    )


def golden(name: str) -> Golden:
    """Return the golden of this name."""
    return next(each for each in goldens() if each.name == name)


def test_a_goldens_variant_is_exported_by_its_name(tmp_path: Path) -> None:
    made = trainload.export(
        trainload.open(golden("variants").package),
        tmp_path / "hinted.pt2",
        to="pt2",
        graph="eval",
        variant="hinted",
    )
    assert (made.graph, sorted(made.inputs), made.difference) == (
        "eval-hinted",
        ["hint", "x", "y"],
        0.0,
    )


@pytest.mark.slow  # the rows of the first tests are already in another order than the graph's
def test_inputs_may_come_in_any_order(tmp_path: Path) -> None:
    batch = {"x": torch.randn(4, 8), "a.mask": torch.rand(4, 8)}

    def both(model: nn.Module, given: dict[str, Any]) -> Tensor:
        result: Tensor = model(given["x"]) * given["a"]["mask"]
        return result

    nested = {"x": batch["x"], "a": {"mask": batch["a.mask"]}}
    package = trainload.freeze(job(Model(), batch=nested, predict=both), tmp_path / "two.tl")
    made = trainload.export(package, tmp_path / "two.pt2", to="pt2")
    assert list(made.inputs) == ["a.mask", "x"]
    module = torch.export.load(made.path).module()  # noqa: TID251  # made here
    sorted_batch = dict(sorted(batch.items()))
    assert torch.equal(module(batch)[0], module(sorted_batch)[0])
    assert_close([{"prediction": module(batch)[0]}], own_results(package, "predict", sorted_batch))


def test_operators_of_other_libraries_stay_and_are_named(tmp_path: Path) -> None:
    package = trainload.open(golden("operators").package, **golden("operators").opening)
    exported = trainload.export(package, tmp_path / "a.pt2", to="pt2", graph="eval")
    assert list(exported.libraries) == ["golden_ops"]
    assert exported.difference == 0.0


def refusal(package: Package, path: Path, **options: Any) -> str:
    with pytest.raises((PackageError, StorageError, ClusterError)) as caught:
        trainload.export(package, path, **{"to": "pt2", **options})
    assert not path.exists() or path.is_dir()
    return str(caught.value)


def test_a_package_without_a_predict_graph_says_which_it_has(
    packaged: Package, tmp_path: Path
) -> None:
    text = refusal(packaged, tmp_path / "a.pt2")
    assert "the package has no such graph (expected eval, got predict)" in text
    assert "--graph eval" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"graph": "train"}, "a training graph cannot be exported"),
        ({"graph": "critic"}, "no such graph (expected eval, predict, got critic)"),
        ({"variant": "short"}, "no such variant (expected only the first variant, got short)"),
        ({"to": "tflite"}, "expected pt2, aoti, huggingface"),
        ({"part": "first"}, "only weights can be exported in part"),
        ({"device": "tpu"}, "expected cpu or cuda, got tpu"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_cannot_be_exported_is_refused(
    trained: Package, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    assert text in refusal(trained, tmp_path / "a.pt2", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed(trained: Package, tmp_path: Path) -> None:
    assert "there is no GPU here" in refusal(trained, tmp_path / "a.pt2", device="cuda")


def test_a_name_that_torch_does_not_open_is_refused(trained: Package, tmp_path: Path) -> None:
    assert "a name that ends in .pt2" in refusal(trained, tmp_path / "small.pth")


def test_a_path_that_is_taken_is_refused(trained: Package, pt2: Path) -> None:
    before = pt2.read_bytes()
    with pytest.raises(StorageError, match="exists already"):
        trainload.export(trained, pt2, to="pt2")
    assert pt2.read_bytes() == before


def test_an_abstract_package_has_nothing_to_export(tmp_path: Path) -> None:
    package = trainload.open(golden("shapes").package)
    assert "this package is abstract" in refusal(package, tmp_path / "a.pt2", graph="eval")


def test_a_damaged_package_leaves_nothing_behind(trained: Package, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained.path, tmp_path / "damaged.tl")
    (weights,) = (tmp_path / "damaged.tl/weights").glob("model-*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    for to, name in (("pt2", "a.pt2"), ("huggingface", "folder")):
        with pytest.raises(IntegrityError):
            trainload.export(trainload.open(tmp_path / "damaged.tl"), tmp_path / name, to=to)  # type: ignore[arg-type]  # one of them
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.tl"]


def test_what_was_written_wrongly_is_noticed(
    trained: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.export.save

    def saves_another(program: Any, *given: Any, **options: Any) -> None:
        program.state_dict["norm.running_mean"] = program.state_dict["norm.running_mean"] + 1
        save(program, *given, **options)
        program.state_dict["norm.running_mean"] = program.state_dict["norm.running_mean"] - 1

    monkeypatch.setattr(torch.export, "save", saves_another)
    assert "differs from the package's own in its output" in refusal(trained, tmp_path / "a.pt2")
    assert list(tmp_path.iterdir()) == []


def test_without_the_comparison_it_is_not_noticed(
    trained: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_called(*_: Any) -> Sequence[Tensor]:
        raise AssertionError("it was opened")

    monkeypatch.setattr(torch.export, "load", not_called)
    assert trainload.export(trained, tmp_path / "a.pt2", to="pt2", check=False).difference is None


def test_a_compiler_that_is_not_there_is_missed(
    trained: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "has_cpp_compiler", lambda: False)
    assert "no C++ compiler" in refusal(trained, tmp_path / "a.pt2", to="aoti")


def test_the_command_writes_beside_the_package(
    trained: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained.path.with_name("trained.pt2")
    assert cli.run(["export", str(trained.path), "--to", "pt2", "--graph", "eval", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["graph"], told["outputs"], told["bytes"]) == (
        str(path),
        "eval",
        ["loss"],
        path.stat().st_size,
    )
    path.unlink()


def test_the_command_says_how_it_is_called(
    trained: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["export", str(trained.path), "--to", "pt2", "-o", str(tmp_path / "a.pt2")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "takes one dict: scale float32[batch, 1], x float32[batch, 8]" in text
    assert "returns a tuple: best, y" in text


def test_the_command_refuses_in_one_line(
    packaged: Package, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        cli.run(["export", str(packaged.path), "--to", "pt2", "-o", str(tmp_path / "a.pt2")]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 1


# tracing removes backward as it does gradients, and autocast as in the export of `everything`
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["function_in_autocast", "function_in_no_grad", "function_in_a_checkpoint"]
)
def test_evaluation_of_what_has_a_backward_of_its_own_comes_out(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    package = trainload.freeze(job(MODELS[name]()), tmp_path / "a.tl")
    made = trainload.export(package, tmp_path / "a.pt2", to="pt2", graph="eval")
    assert made.difference is not None and made.difference <= 1e-3
