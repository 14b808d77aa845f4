"""Differences between two packages."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.packaging.jobs import RevisedModel, make_job
from tests.packaging.tampering import UNKNOWN_LIBRARY, edit_graph, edit_manifest, flip, reseal

from trainload.cli import main as cli
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.packaging.comparison.graph_difference import (
    MOST_PAIRS,
    GraphDifference,
    graph_difference,
)
from trainload.packaging.comparison.graph_lines import GraphLines, Line
from trainload.packaging.comparison.json_change import Change, changes
from trainload.packaging.comparison.package_difference import PackageDifference, package_difference
from trainload.packaging.comparison.weight_distance import TensorDifference, tensor_difference
from trainload.packaging.package import Package, open_package
from trainload.packaging.tensors.safetensors_file import DTYPES
from trainload.packaging.write import with_weights, write_package


@pytest.fixture(scope="module")
def revised(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of the same job after a day's changes."""
    folder = tmp_path_factory.mktemp("revised")
    (folder / "LICENSE").write_text("do as you like\nbut say so\n")
    job = make_job(model=RevisedModel)
    recipe = job.recipe.model_copy(update={"steps": 3, "clip_norm": 1.0})
    return write_package(
        folder / "job.tl",
        job.program,
        job.updates,
        recipe,
        assets={"LICENSE": folder / "LICENSE"},
        max_shard=600,
    )


@pytest.fixture(scope="module")
def found(packaged: Package, revised: Package) -> PackageDifference:
    """Differences between the two packages."""
    return package_difference(packaged.path, revised.path)


@pytest.fixture(scope="module")
def trained(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A child of the package with three other tensors, one of which has a NaN."""
    state = packaged.program().state
    new = {name: state[name] for name in state}
    new["lin.bias"] = state["lin.bias"] * 1.5
    new["emb.weight"] = state["emb.weight"].clone()
    new["emb.weight"][3, 4] += 2.0
    new["norm.bias"] = state["norm.bias"].clone()
    new["norm.bias"][0] = math.nan
    return with_weights(packaged, tmp_path_factory.mktemp("trained") / "new.tl", list(new.items()))


def section(found: PackageDifference, title: str) -> dict[str, tuple[str | None, str | None]]:
    listed = next((part.changes for part in found.sections if part.title == title), ())
    return {change.name: (change.before, change.after) for change in listed}


def graph(found: PackageDifference, name: str = "train") -> GraphDifference:
    return next(graph for graph in found.graphs if graph.name == name)


def lines(found: PackageDifference, module: str) -> list[str]:
    return [
        f"{line.mark} {line.text.strip()}"
        for part in graph(found).modules
        if part.module == module
        for line in part.lines
    ]


def test_a_package_and_its_copy_do_not_differ(packaged: Package, copied: Path) -> None:
    found = package_difference(packaged.path, copied)
    assert found.same
    assert (found.sections, found.graphs, found.texts, found.weights) == ((), (), (), None)


def test_packages_that_differ_in_debug_alone_do_not_differ(packaged: Package, copied: Path) -> None:
    shutil.rmtree(copied / "debug")
    assert package_difference(packaged.path, copied).same


def test_the_recipe_is_compared_by_field(found: PackageDifference) -> None:
    assert section(found, "recipe") == {
        "clip_norm": ("null", "1.0"),
        "steps": ("2", "3"),
        "groups.rest.parameters: out.weight": (None, "listed"),
        "groups.rest.parameters: out.bias": (None, "listed"),
    }


def test_parameters_are_compared_by_name_and_shape(found: PackageDifference) -> None:
    assert section(found, "parameters") == {
        "lin.bias": ("float32[8]", "float32[12]"),
        "lin.weight": ("float32[8, 8]", "float32[12, 8]"),
        "out.bias": (None, "float32[8]"),
        "out.weight": (None, "float32[8, 12]"),
    }


def test_operators_are_compared_by_schema(found: PackageDifference) -> None:
    operators = section(found, "operators")
    assert operators["torch.ops.aten.cos.default"] == ("aten::cos(Tensor self) -> Tensor", None)
    assert operators["torch.ops.aten.tanh.default"] == (None, "aten::tanh(Tensor self) -> Tensor")


def test_calls_of_operators_are_counted_before_and_after(found: PackageDifference) -> None:
    counts = {change.name: (change.before, change.after) for change in graph(found).operators}
    assert counts == {
        "aten.cos": ("1", None),
        "aten.tanh": (None, "1"),
        "aten.relu": (None, "1"),
        "aten.linear": ("2", "3"),
    }


def test_an_argument_that_changed_is_a_node_that_changed(found: PackageDifference) -> None:
    (before, after) = lines(found, "drop")
    assert before.startswith("- aten.dropout(:cond, 0.1, True)")
    assert after.startswith("+ aten.dropout(:cond, 0.2, True)")


def test_a_module_that_was_added_is_listed_with_its_nodes(found: PackageDifference) -> None:
    (line,) = lines(found, "out")
    assert line.startswith("+ aten.linear(:aten.relu, out.weight, out.bias)")


def test_nodes_within_bodies_of_control_flow_are_compared(found: PackageDifference) -> None:
    root = lines(found, "")
    assert any(line.startswith("- aten.cos(operand 0)") for line in root)
    assert any(line.startswith("+ aten.tanh(operand 0)") for line in root)


def test_nodes_after_one_that_was_put_in_do_not_change(found: PackageDifference) -> None:
    """In the files all of these change: relu and out come before them, and torch numbers names."""
    assert {part.module for part in graph(found).modules} == {"", "drop", "out", "norm"}
    assert lines(found, "head") == lines(found, "emb") == []


def test_a_value_of_another_size_is_told_of_a_node_that_stayed(found: PackageDifference) -> None:
    values = {change.name: (change.before, change.after) for change in graph(found).values}
    before, after = values["lin:   aten.linear(operand 0, operand 1, operand 2)"]
    assert before is not None and after is not None
    assert (before.startswith("bfloat16["), before.endswith(", 8]"), after.endswith(", 12]")) == (
        True,
        True,
        True,
    )


def test_constants_that_changed_are_among_the_weights(found: PackageDifference) -> None:
    assert found.weights is not None
    constants = {
        tensor.name: tensor.greatest
        for tensor in found.weights
        if tensor.name.startswith("constant ")
    }
    assert constants == {
        "constant eval/lifted_tensor_0": 1.0,
        "constant train/lifted_tensor_0": 1.0,
    }


def test_lines_of_an_asset_are_compared(found: PackageDifference) -> None:
    (text,) = found.texts
    assert text.file == "assets/LICENSE"
    assert "+but say so" in text.lines


def test_files_are_listed_that_are_extra_missing_or_changed(found: PackageDifference) -> None:
    files = section(found, "files")
    assert files["weights/model-00004-of-00004.safetensors"][0] is None
    assert files["weights/model-00003-of-00003.safetensors"][1] is None
    assert None not in files["graphs/train.json"]
    assert "graphs/update-matrices-first.json" not in files


def test_a_child_is_told_by_its_parent(packaged: Package, trained: Package) -> None:
    assert (
        package_difference(packaged.path, trained.path).relation
        == "the second was made from the first"
    )
    assert (
        package_difference(trained.path, packaged.path).relation
        == "the first was made from the second"
    )


def test_training_leaves_the_program_and_changes_weights(
    packaged: Package, trained: Package
) -> None:
    found = package_difference(packaged.path, trained.path)
    assert found.before.program == found.after.program
    assert {part.title for part in found.sections} == {"format", "files"}
    assert found.graphs == ()


def test_tensors_are_listed_with_the_greatest_change_first(
    packaged: Package, trained: Package
) -> None:
    weights = package_difference(packaged.path, trained.path).weights
    assert weights is not None
    nan, one, scaled = weights
    assert (nan.name, nan.not_finite, nan.changed) == ("norm.bias", (0, 1), 1)
    assert (scaled.name, scaled.changed) == ("lin.bias", 8)
    assert scaled.relative == pytest.approx(0.5, rel=1e-6)
    assert (one.name, one.changed, one.elements) == ("emb.weight", 1, 128)
    assert one.greatest == pytest.approx(2.0, rel=1e-6)


def test_files_of_weights_with_the_same_digest_are_not_read(
    packaged: Package, trained: Package, tmp_path: Path
) -> None:
    same = next(
        path for path in packaged.manifest.files if path.startswith("weights/non-persistent")
    )
    assert packaged.manifest.files[same] == trained.manifest.files[same]
    for name, package in (("a.tl", packaged), ("b.tl", trained)):
        shutil.copytree(package.path, tmp_path / name)
        flip(tmp_path / name / same, -1)
    assert package_difference(tmp_path / "a.tl", tmp_path / "b.tl").weights


def test_weights_that_are_read_are_checked(
    packaged: Package, trained: Package, tmp_path: Path
) -> None:
    shutil.copytree(trained.path, tmp_path / "b.tl")
    changed = next(
        path
        for path in trained.manifest.files
        if path.startswith("weights/model-") and path not in _same(packaged, trained)
    )
    flip(tmp_path / "b.tl" / changed, -1)
    with pytest.raises(IntegrityError, match="weights"):
        package_difference(packaged.path, tmp_path / "b.tl")


def _same(a: Package, b: Package) -> set[str]:
    return {path for path, entry in a.manifest.files.items() if b.manifest.files.get(path) == entry}


def test_weights_are_left_alone_where_nobody_asks(packaged: Package, trained: Package) -> None:
    found = package_difference(packaged.path, trained.path, weights=False)
    assert (found.weights, found.weights_note) == (None, "not compared")


def test_an_abstract_package_is_compared_without_weights(packaged: Package, copied: Path) -> None:
    shutil.rmtree(copied / "weights")
    proof = {
        "reduced_parameters": 1,
        "reduced_program": "0" * 64,
        "structure": "0" * 64,
        "check": "usual",
    }

    def without_weights(manifest: dict[str, Any]) -> None:
        manifest["files"] = {
            path: entry
            for path, entry in manifest["files"].items()
            if not path.startswith("weights/")
        }
        manifest.update(features=["abstract"], abstract=proof)

    edit_manifest(copied, without_weights)
    found = package_difference(packaged.path, copied)
    assert (found.weights, found.weights_note) == (
        None,
        "not compared: the second package is abstract",
    )
    assert section(found, "format")["features: abstract"] == (None, "listed")


def test_packages_are_compared_where_their_operators_are_missing(
    packaged: Package, copied: Path
) -> None:
    def foreign(document: dict[str, Any]) -> None:
        node = next(
            node
            for node in document["graph_module"]["graph"]["nodes"]
            if node["target"] == "torch.ops.aten.dropout.default"
        )
        node["target"] = "torch.ops.nowhere.dropout.default"

    edit_graph(copied, foreign)
    schema = {"torch.ops.nowhere.dropout.default": "nowhere::dropout(Tensor x) -> Tensor"}
    edit_manifest(
        copied,
        lambda m: m.update(
            features=["custom-ops", *m["features"]],
            op_libraries={"nowhere": UNKNOWN_LIBRARY},
            ops=m["ops"] | schema,
        ),
    )
    with pytest.raises(PackageError, match="nowhere"):
        open_package(copied)
    found = package_difference(packaged.path, copied)
    assert {change.name for change in graph(found).operators} == {"nowhere.dropout", "aten.dropout"}
    ((name, (before, after)),) = section(found, "operator libraries").items()
    assert (
        (name, before) == ("nowhere", None) and after is not None and '"distribution":null' in after
    )


def test_an_unsafe_graph_is_refused(packaged: Package, copied: Path) -> None:
    edit_graph(
        copied,
        lambda document: document["graph_module"]["graph"]["nodes"][0].update(target="os.system"),
    )
    with pytest.raises(UnsafePackageError, match=r"graphs/train\.json"):
        package_difference(packaged.path, copied)


def test_a_graph_that_differs_in_nothing_that_a_line_shows_is_said_to_differ(
    packaged: Package, copied: Path
) -> None:
    def strides(document: dict[str, Any]) -> None:
        meta = next(iter(document["graph_module"]["graph"]["tensor_values"].values()))
        meta["requires_grad"] = not meta["requires_grad"]

    edit_graph(copied, strides)
    found = graph(package_difference(packaged.path, copied))
    assert (found.unseen, found.operators, found.modules, found.values) == (True, (), (), ())


def test_values_that_are_swapped_are_a_difference(packaged: Package, copied: Path) -> None:
    def swap(document: dict[str, Any]) -> None:
        nodes = document["graph_module"]["graph"]["nodes"]
        node = next(
            node for node in nodes if node["target"] == "torch.ops.aten.cross_entropy_loss.default"
        )
        node["inputs"][0]["arg"], node["inputs"][1]["arg"] = (
            node["inputs"][1]["arg"],
            node["inputs"][0]["arg"],
        )

    edit_graph(copied, swap)
    assert lines(package_difference(packaged.path, copied), "") == [
        "- aten.cross_entropy_loss(head:aten.linear, y) -> float32[]",
        "+ aten.cross_entropy_loss(y, head:aten.linear) -> float32[]",
    ]


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "parent": lambda m: m.update(parent="0" * 64),
    "seed": lambda m: m["recipe"].update(seed=5),
    "a learning rate": lambda m: m["recipe"]["groups"][0].update(learning_rates=[0.1, 0.06]),
    "quantiles": lambda m: m["graphs"]["train"]["inputs"][0]["quantiles"].pop(),
    "a name of a dim": lambda m: m["graphs"]["train"]["inputs"][0]["shape"].__setitem__(0, "rows"),
    "an output's name": lambda m: m["graphs"]["train"]["outputs"][1].update(name="hits"),
    "the order of parameters": lambda m: m["parameters"].reverse(),
    "the order of buffers": lambda m: m["buffers"].reverse(),
    "what is trained": lambda m: m["buffers"][0].update(
        persistent=not m["buffers"][0]["persistent"]
    ),
    "state of an optimizer": lambda m: m["updates"][0]["state"][0].update(name="momentum"),
    "a schema": lambda m: m["ops"].update(
        {"torch.ops.aten.sin.default": "aten::sin(Tensor self) -> Tensor[]"}
    ),
    "a media type": lambda m: m["files"]["assets/LICENSE"].update(media_type="text/html"),
    "training": lambda m: m.update(
        features=sorted([*m["features"], "training"]),
        training={"steps": 3, "data": "0" * 64, "changed": [{"step": 0, "settings": {"lr": 0.1}}]},
    ),
    "a pass": lambda m: m["passes"].append(
        {
            "name": "a:b",
            "distribution": None,
            "version": None,
            "source": None,
            "options": {},
            "preserving": True,
        }
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_whatever_differs_in_a_manifest_is_listed(
    packaged: Package, copied: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        edit(manifest)

    edit_manifest(copied, change)
    found = package_difference(packaged.path, copied, weights=False)
    assert not found.same
    assert sum(len(part.changes) for part in found.sections) >= 1


# Values


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, 1.0, 0.5])
    | st.sampled_from("ab"),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["name", "a", "b"]), inner)
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_there_is_a_change_if_and_only_if_the_json_differs(before: object, after: object) -> None:
    assert bool(list(changes("x", before, after))) == (
        canonical_json(before) != canonical_json(after)
    )


def test_a_table_of_numbers_differs_at_its_first_other_entry() -> None:
    before = [0.1] * 1000
    assert list(changes("rates", before, [*before[:700], 0.2, *before[701:]])) == [
        Change("rates[700]", "0.1, of 1000", "0.2, of 1000")
    ]
    assert list(changes("rates", before, before[:900])) == [
        Change("rates[900]", "0.1, of 1000", "nothing, of 900")
    ]


def test_a_module_of_very_many_nodes_that_are_alike_is_compared_by_how_often_each_occurs() -> None:
    many = tuple(Line("", f"aten.op{number % 7}(x)", "") for number in range(MOST_PAIRS // 50))
    found = graph_difference(
        "train",
        GraphLines(many, {}),
        GraphLines((*reversed(many), Line("", "aten.new(x)", "")), {}),
    )
    (module,) = found.modules
    assert [(line.mark, line.text) for line in module.lines] == [("+", "aten.new(x)")]


def compared(before: torch.Tensor, after: torch.Tensor) -> TensorDifference:
    blocks = [(before[:3], after[:3]), (before[3:], after[3:])]
    return tensor_difference("t", before.dtype, tuple(before.shape), blocks)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"bool"}))
def test_tensors_of_every_dtype_are_compared(dtype: str) -> None:
    before = torch.tensor([1.0, 2.0, 0.0, 2.0, 0.0]).to(DTYPES[dtype])
    after = torch.tensor([1.0, 2.0, 0.0, 8.0, 1.0]).to(DTYPES[dtype])
    found = compared(before, after)
    assert (found.changed, found.greatest, found.elements) == (2, 6.0, 5)
    assert found.relative == pytest.approx(math.sqrt(37 / 9))


def test_tensors_of_truth_values_are_compared() -> None:
    found = compared(
        torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    )
    assert (found.changed, found.greatest) == (2, 1.0)


def test_a_zero_of_the_other_sign_is_a_change_of_bits_alone() -> None:
    found = compared(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.changed, found.greatest, found.relative) == (1, 0.0, 0.0)


def test_a_nan_that_stays_is_no_change() -> None:
    both = torch.tensor([math.nan, 1.0])
    assert compared(both, both.clone()).changed == 0


def test_what_was_all_zero_has_no_relative_change() -> None:
    assert compared(torch.zeros(4), torch.ones(4)).relative is None


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    status = cli.run(["diff", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_the_command_says_that_there_is_no_difference(
    packaged: Package, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, packaged.path, copied, "--exit-code") == (
        0,
        f"no differences: both are {packaged.digest}\n",
    )


def test_the_exit_status_tells_a_difference_where_it_is_asked_for(
    packaged: Package, trained: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, packaged.path, trained.path)[0] == 0
    assert run(capsys, packaged.path, trained.path, "--exit-code")[0] == 1


def test_as_many_tensors_are_printed_as_are_asked_for(
    packaged: Package, trained: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run(capsys, packaged.path, trained.path, "--weights", "2")
    assert "norm.bias" in text and "emb.weight" in text and "lin.bias" not in text
    assert "and 1 more" in text


def test_the_command_prints_a_review(
    packaged: Package, revised: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run(capsys, packaged.path, revised.path)
    printed = text.splitlines()
    assert "  ~ lin.bias: float32[8] -> float32[12]" in printed
    assert "  + groups.rest.parameters: out.weight" in printed
    assert "  ~ aten.linear: 2 -> 3" in printed
    assert "  in drop:" in printed


def test_what_differs_in_one_field_alone_is_printed_once(
    packaged: Package, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(copied, lambda manifest: manifest["recipe"].update(seed=8))
    printed = run(capsys, packaged.path, copied)[1].splitlines()
    assert printed[printed.index("recipe (1)") :] == [
        "recipe (1)",
        "  ~ seed: 0 -> 8",
        "weights",
        "  the same",
    ]


def test_long_parts_are_cut_unless_all_is_asked_for(
    packaged: Package, revised: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    short, full = (
        run(capsys, packaged.path, revised.path, *extra)[1] for extra in ((), ("--full",))
    )
    assert ("more lines: --full" in short, "more lines: --full" in full) == (
        len(full.splitlines()) > len(short.splitlines()),
        False,
    )


def test_json_holds_everything(
    packaged: Package, trained: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run(capsys, packaged.path, trained.path, "--json", "--weights", "0")
    found = json.loads(text)
    assert (found["same"], found["relation"]) == (False, "the second was made from the first")
    assert [tensor["name"] for tensor in found["weights"]] == [
        "norm.bias",
        "emb.weight",
        "lin.bias",
    ]


def test_what_a_terminal_would_obey_is_not_printed(
    packaged: Package, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "assets/LICENSE").write_text("\x1b]0;owned\x07\n")
    reseal(copied)
    assert "\x1b" not in run(capsys, packaged.path, copied)[1]
