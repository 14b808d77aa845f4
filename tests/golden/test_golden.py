"""Packages of earlier format versions open, and train two steps with their recorded losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.golden.goldens import (
    FP32,
    TOLERANCES,
    Golden,
    goldens,
    initial_digests,
    train,
)
from torch._export.serde.schema import GraphModule
from torch._export.serde.serialize import _dict_to_dataclass

import trainload
from trainload.packaging.format.format_version import FEATURES, FORMAT_VERSION
from trainload.packaging.graphs.graph_json import _decoded
from trainload.packaging.signatures.verify import verify_package

GOLDENS = list(goldens())


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_every_byte_of_it_is_sound(golden: Golden) -> None:
    assert verify_package(golden.package).problems == ()


# other tests train several graphs and variants, as the current version writes them
@pytest.mark.matrix("v1-plain", "v1-operators")
@pytest.mark.parametrize(
    "golden", [golden for golden in GOLDENS if (golden.folder / "losses.json").exists()], ids=str
)
def test_it_trains_as_it_did(golden: Golden, tmp_path: Path) -> None:
    package = trainload.open(golden.package, **golden.opening)
    expected = json.loads((golden.folder / "losses.json").read_text())
    found = train(package, golden.data, tmp_path / "run", **golden.opening)
    tolerance = TOLERANCES.get(golden.name, FP32)
    assert found == {
        kind: pytest.approx(expected[kind], rel=tolerance) for kind in ("train", "eval")
    }


@pytest.mark.parametrize(
    "golden", [golden for golden in GOLDENS if golden.name == "shapes"], ids=str
)
def test_one_without_weights_is_planned(golden: Golden) -> None:
    plan = trainload.plan(
        trainload.open(golden.package), trainload.Cluster(devices_per_node=2), "zero3"
    )
    assert plan.estimate.parameter_bytes > 0


@pytest.mark.parametrize(
    "golden", [golden for golden in GOLDENS if (golden.folder / "initial.json").exists()], ids=str
)
def test_its_first_values_are_what_they_were(golden: Golden) -> None:
    expected = json.loads((golden.folder / "initial.json").read_text())
    assert initial_digests(trainload.open(golden.package)) == expected


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_it_names_no_file_of_the_machine_that_made_it(golden: Golden) -> None:
    held = [path.read_bytes() for path in golden.package.rglob("*.json")]
    assert [data for data in held if b"/home/" in data or b"/tmp/" in data or b".py" in data] == []


def test_graph_files_are_decoded_as_torch_decodes_them() -> None:
    newest = {golden.name: golden for golden in GOLDENS}
    files = [path for golden in newest.values() for path in golden.package.glob("graphs/*.json")]
    graphs = [json.loads(path.read_bytes())["graph_module"] for path in files]
    assert [_decoded(GraphModule, graph) for graph in graphs] == [
        _dict_to_dataclass(GraphModule, graph)  # type: ignore[no-untyped-call]
        for graph in graphs
    ]
    assert graphs


def test_every_version_has_goldens_with_all_of_its_features() -> None:
    lacking = {
        version: set(FEATURES) - LATER.get(version, set())
        for version in range(1, FORMAT_VERSION + 1)
    }
    for golden in GOLDENS:
        lacking[golden.version] -= set(
            json.loads((golden.package / "manifest.json").read_bytes())["features"]
        )
    assert {version: left for version, left in lacking.items() if left} == {}


LATER = {1: {"extensions", "initialization", "training", "weight-source"}}
"""Version -> features that were added later."""
