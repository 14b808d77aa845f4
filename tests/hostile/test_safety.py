"""Hostile packages are rejected.

Digests and checksums are correct in every case.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hostile.graphs import ATTACKS, CODE, Change, Document, first_symbol, nodes
from tests.packaging.tampering import UNKNOWN_LIBRARY, edit_graph, edit_manifest, write_manifest

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import PackageError, UnsafePackageError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.graphs.graph_json import graph_from_json
from trainload.packaging.graphs.validate import validate_graph
from trainload.packaging.package import Package, open_package


@pytest.mark.matrix("code as a symbolic size", "function of Python", "enum in a treespec")
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_hostile_graph_is_refused_by_file_before_torch_reads_it(
    copied: Path, attack: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainload.packaging.package.graph_from_json", _never)
    edit_graph(copied, attack)
    with pytest.raises(UnsafePackageError, match=r"graphs/train\.json"):
        open_package(copied).graph("train")


def _never(*args: object) -> None:
    raise AssertionError("torch was given a graph that should have been refused")


def test_what_is_attacked_is_fine_without_the_attack(copied: Path) -> None:
    edit_graph(copied, lambda graph: None)
    open_package(copied).program()


def test_a_symbolic_size_that_runs_code_when_torch_reads_it_is_real(
    copied: Path, tmp_path: Path
) -> None:
    sentinel = tmp_path / "ran"
    document = json.loads((copied / "graphs/train.json").read_bytes())
    first_symbol(document).update(expr_str=CODE.format(sentinel))
    with pytest.raises(PackageError, match="rejects"):
        graph_from_json(document, {}, {})
    assert sentinel.exists()  # this is why there is a validator
    sentinel.unlink()
    edit_graph(copied, lambda graph: first_symbol(graph).update(expr_str=CODE.format(sentinel)))
    with pytest.raises(UnsafePackageError):
        open_package(copied).program()
    assert not sentinel.exists()


def test_an_error_names_node_and_rule(copied: Path) -> None:
    edit_graph(
        copied, lambda graph: nodes(graph)[2].update(target="torch.ops.aten.from_file.default")
    )
    name = json.loads((copied / "graphs/train.json").read_bytes())["graph_module"]["graph"][
        "nodes"
    ][2]["name"]
    with pytest.raises(
        UnsafePackageError, match=rf"graphs/train\.json, node {name}: .*from_file.*denied"
    ):
        open_package(copied).program()


def test_an_operator_that_the_manifest_does_not_list_is_refused(copied: Path) -> None:
    edit_graph(copied, lambda graph: nodes(graph)[0].update(target="torch.ops.aten.relu.default"))
    with pytest.raises(UnsafePackageError, match="does not list"):
        open_package(copied).program()


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "os.system",
        "torch.ops.aten.__class__",
        "torch.ops.higher_order.cond",
        "torch.ops.aten.add.Tensor.x",
        "aten",
    ],
)
def test_the_manifest_cannot_list_what_is_no_operator(copied: Path, name: str) -> None:
    edit_manifest(copied, lambda manifest: manifest["ops"].update({name: "x"}))
    with pytest.raises(PackageError, match="missing"):
        open_package(copied)


@pytest.fixture
def custom_operator() -> Any:
    with torch.library._scoped_library("trainload_test_ops", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("double", lambda x: torch.empty_like(x), "Meta")
        yield


@pytest.mark.usefixtures("custom_operator")
def test_an_operator_of_another_library_needs_its_owners_word(copied: Path) -> None:
    name = "torch.ops.trainload_test_ops.double.default"

    def use(graph: Document) -> None:
        node = next(
            node
            for node in nodes(graph)
            if node["target"] == "torch.ops.aten.lift_fresh_copy.default"
        )
        node["target"] = name
        node["inputs"][0]["name"] = "x"

    edit_graph(copied, use)
    edit_manifest(
        copied,
        lambda manifest: manifest["ops"].update(
            {name: "trainload_test_ops::double(Tensor x) -> Tensor"}
        ),
    )
    with pytest.raises(UnsafePackageError, match="allow the namespace trainload_test_ops"):
        open_package(copied).program()
    edit_manifest(
        copied, lambda manifest: manifest["op_libraries"].update(trainload_test_ops=UNKNOWN_LIBRARY)
    )
    with pytest.raises(UnsafePackageError, match="allow the namespace trainload_test_ops"):
        open_package(copied)
    assert (
        open_package(copied, namespaces={"trainload_test_ops"}).program().graphs["train"].exported
        is not None
    )


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 600), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_random_changes_of_a_graph_end_in_a_graph_or_in_a_package_error(
    packaged: Package, seeds: range
) -> None:
    original = json.loads((packaged.path / "graphs/train.json").read_bytes())
    state = packaged._state(meta=True)
    outcomes = {"loaded": 0, "unsafe": 0, "refused": 0}
    for seed in seeds:
        document = _mutated(original, random.Random(seed))
        try:
            document = parse_canonical(canonical_json(document), "g")
            validate_graph(document, "g")
            graph_from_json(document, state, {"lifted_tensor_0": torch.ones(1)}, "g")
            outcomes["loaded"] += 1
        except UnsafePackageError:
            outcomes["unsafe"] += 1
        except PackageError:
            outcomes["refused"] += 1
    assert outcomes["unsafe"] > len(seeds) // 4
    assert outcomes["loaded"] + outcomes["refused"] > len(seeds) // 20


def test_random_changes_of_a_manifest_end_in_a_package_or_in_a_package_error(copied: Path) -> None:
    original = json.loads((copied / "manifest.json").read_bytes())
    refused = 0
    for seed in range(120):
        write_manifest(copied, _mutated(original, random.Random(seed)))
        try:
            package = open_package(copied)
            assert Manifest.from_bytes(package.manifest.to_bytes(), "m") == package.manifest
        except PackageError:
            refused += 1
    assert refused > 60


_STRANGE: list[Any] = [None, True, -1, 0, 3, 2**63, 1.5, "", "x", "s0", "Infinity", [], {}, [[]]]
_STRANGE += [{"as_int": 7}, {"as_name": "x"}, "torch.ops.aten.add.Tensor"]


def _mutated(document: Document, rng: random.Random) -> Document:
    changed = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(inner, dict | list):
                visit(inner)

    visit(changed)
    for _ in range(rng.randint(1, 2)):
        holder, key = rng.choice(places)
        other_holder, other_key = rng.choice(places)
        try:
            kind = rng.randrange(4)
            if kind == 0:
                holder[key] = rng.choice(_STRANGE)
            elif kind == 1:
                del holder[key]
            elif kind == 2:
                holder[key] = copy.deepcopy(other_holder[other_key])
            elif isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
        except (KeyError, IndexError):
            continue
    return changed
