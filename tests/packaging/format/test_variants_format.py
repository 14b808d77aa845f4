"""Guards in a package are stored in order, and rejected if they are inconsistent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.jobs import sgd
from tests.packaging.tampering import edit_manifest
from torch import Tensor, nn
from torch.export import Dim

import trainload
from trainload.cli import main as cli
from trainload.core.errors import DataError, JobError, PackageError
from trainload.freezing.load_job import load_job
from trainload.packaging.format.entries import graph_guard
from trainload.packaging.package import Package, open_package
from trainload.packaging.write import with_graphs
from trainload.passes import decompose

JOB = """
import torch
import trainload


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x, mask=None):
        y = self.linear(x)
        return (y if mask is None else y * mask).square().mean()


def job():
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    masked = {"x": x, "mask": torch.ones(4, 6)}
    return trainload.Job(
        model=Model(), batch={"x": x}, variants={"masked": masked}, optimizer=sgd
    )
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, task: str = "a") -> Tensor:
        y = self.linear(x)
        y = y if mask is None else y * mask[..., None]
        found: Tensor = y.square().mean() if task == "a" else y.abs().mean()
        return found


def predict(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    assert isinstance(model, Model)
    found: Tensor = model.linear(batch["x"])
    return found


def batch(length: int, **more: Any) -> dict[str, Any]:
    return {"x": torch.randn(4, length, 6), "task": "a", **more}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    job = trainload.Job(
        model=Model(),
        batch=batch(5),
        variants={"z_masked": batch(5, mask=torch.ones(4, 5)), "b": batch(5) | {"task": "b"}},
        optimizer=sgd,
        predict=predict,
        predict_inputs=["x"],
        dynamic={"x": {1: Dim.AUTO}, "mask": {1: Dim.AUTO}},
    )
    return trainload.freeze(job, tmp_path_factory.mktemp("guards") / "job.tl")


def test_the_order_of_the_variants_is_the_jobs(package: Package) -> None:
    assert package.manifest.variants == ("z_masked", "b")


def test_a_package_with_variants_asks_for_the_feature(package: Package) -> None:
    assert "variants" in package.manifest.features


def test_guards_are_read_back_as_they_were_written(package: Package) -> None:
    program = package.program()
    assert {name: graph.guard for name, graph in program.graphs.items()} == {
        name: graph_guard(entry) for name, entry in package.manifest.graphs.items()
    }
    assert program.variants == ("z_masked", "b")


def test_a_package_of_other_graphs_keeps_the_guards(package: Package, tmp_path: Path) -> None:
    made = with_graphs(package, tmp_path / "other.tl", package.program(), ())
    assert made.manifest.variants == package.manifest.variants
    assert {n: e.guard for n, e in made.manifest.graphs.items()} == {
        n: e.guard for n, e in package.manifest.graphs.items()
    }


@pytest.mark.parametrize(
    ("given", "graph", "name"),
    [
        (batch(7), "train", "train"),
        (batch(7, mask=torch.ones(4, 7)), "train", "train-z_masked"),
        (batch(7) | {"task": "b"}, "eval", "eval-b"),
        ({"x": torch.randn(2, 3, 6)}, "predict", "predict"),
        (batch(3, mask=torch.ones(4, 3)), "predict", "predict"),
    ],
)
def test_a_batch_is_given_to_the_graph_that_takes_it(
    package: Package, given: dict[str, Any], graph: str, name: str
) -> None:
    assert package.dispatch(given, graph) == name


def test_the_graph_that_is_picked_takes_the_batch(package: Package) -> None:
    given = {"mask": torch.rand(3, 9), "x": torch.randn(3, 9, 6)}
    name = package.dispatch({**given, "task": "a"})
    (loss,) = package.graph(name).module(check_guards=True)(given)
    weight, bias = package.weights.tensor("linear.weight"), package.weights.tensor("linear.bias")
    eager = (
        (nn.functional.linear(given["x"], weight, bias) * given["mask"][..., None]).square().mean()
    )
    torch.testing.assert_close(loss, eager)


def test_a_batch_that_fits_none_is_refused(package: Package) -> None:
    with pytest.raises(
        DataError, match=r"z_masked: mask\[1\]: expected 7, got 8|x\[1\]: expected 8, as mask"
    ):
        package.dispatch(batch(7, mask=torch.ones(4, 8)))


def test_a_graph_that_there_is_not_is_named(package: Package) -> None:
    with pytest.raises(PackageError, match="eval, predict, train"):
        package.dispatch(batch(7), "train-b")


Change = Callable[[dict[str, Any]], Any]


def guard(change: Change) -> Change:
    return lambda manifest: change(manifest["graphs"]["train-b"]["guard"])


HOSTILE: dict[str, Change] = {
    "code": guard(lambda g: g["conditions"].append("__import__('os').system('true')")),
    "a symbol that no size tells": guard(lambda g: g["conditions"].append("other < 3")),
    "a range of nothing": guard(lambda g: g["ranges"].update(other=[0, None])),
    "a symbol without a range": guard(lambda g: g["ranges"].pop("x_1")),
    "an empty range": guard(lambda g: g["ranges"].update(x_1=[9, 3])),
    "another rank": guard(lambda g: g["sizes"][0].append(3)),
    "another size": guard(lambda g: g["sizes"][0].__setitem__(2, 7)),
    "no size": guard(lambda g: g["sizes"].pop()),
    "a size that is code": guard(lambda g: g["sizes"][0].__setitem__(1, "exec(1)")),
    "an unsolvable size": guard(lambda g: g["sizes"][0].__setitem__(1, "x_1*x_1")),
    "an absent input that is there": guard(lambda g: g["absent"].append("x")),
    "another kind of constant": guard(lambda g: g["constants"]["task"].update(kind="code")),
    "a long condition": guard(lambda g: g["conditions"].append("x_1 + " * 2000 + "1")),
    "a guard that is gone": lambda m: m["graphs"]["train-b"].pop("guard"),
    "a variant out of order": lambda m: m["variants"].remove("b"),
    "a variant without graphs": lambda m: m["variants"].append("c"),
    "a variant twice": lambda m: m["variants"].append("b"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_whose_guards_do_not_hold_together_is_refused(
    package: Package, name: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.tl"
    shutil.copytree(package.path, copy)
    edit_manifest(copy, HOSTILE[name])
    with pytest.raises(PackageError):
        open_package(copy)


def test_a_package_from_before_guards_is_dispatched_by_its_inputs(packaged: Package) -> None:
    assert all(entry.guard is None for entry in packaged.manifest.graphs.values())
    shapes = {
        i.name: [3 if isinstance(s, str) else s for s in i.shape]
        for i in packaged.manifest.graphs["train"].inputs
    }
    dtypes = {i.name: getattr(torch, i.dtype) for i in packaged.manifest.graphs["train"].inputs}
    assert (
        packaged.dispatch(
            {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        )
        == "train"
    )


def test_inspect_says_what_each_graph_takes_in_their_order(
    package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(package.path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    first, masked, other = (f"takes {name}: " for name in ("train", "train-z_masked", "train-b"))
    assert said.index(first) < said.index(masked) < said.index(other)
    assert "train: x float32[batch, x_1, 6]; without mask; task='a'; x_1 2 or more" in said


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder in which the command froze `JOB`, and the command's output.

    It froze variants_job.py to job.tl.
    """
    folder = tmp_path_factory.mktemp("command")
    (folder / "variants_job.py").write_text(JOB)
    with redirect_stdout(StringIO()) as said:
        assert (
            cli.run(["freeze", f"{folder / 'variants_job.py'}:job", "-o", str(folder / "job.tl")])
            == 0
        )
    return folder, said.getvalue()


def test_freeze_names_the_variants(by_command: tuple[Path, str]) -> None:
    assert "variants the first, masked" in " ".join(by_command[1].split())


@pytest.mark.slow
def test_a_pass_keeps_what_each_graph_takes(package: Package, tmp_path: Path) -> None:
    made = trainload.transform(package, [(decompose, {"operators": "core"})], tmp_path / "core.tl")
    assert made.dispatch({**batch(7), "task": "b"}) == "train-b"


def test_a_variant_that_would_never_run_is_refused(tmp_path: Path) -> None:
    job = trainload.Job(model=Model(), batch=batch(5), variants={"same": batch(5)}, optimizer=sgd)
    with pytest.raises(
        JobError, match=r"Job\.variants\['same'\]: the variant would never be selected"
    ):
        trainload.freeze(job, tmp_path / "job.tl")
    assert not (tmp_path / "job.tl").exists()


@pytest.mark.slow
def test_the_same_job_of_variants_gives_the_same_bytes(
    by_command: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = by_command
    again = trainload.freeze(load_job(f"{folder / 'variants_job.py'}:job"), tmp_path / "again.tl")
    assert again.digest == open_package(folder / "job.tl").digest
