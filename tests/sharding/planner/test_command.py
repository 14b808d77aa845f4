"""`trainload plan --device`: candidates on a screen, for scripts and per node.

If nothing fits, the command explains why.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from trainload.cli import main as cli
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

Capture = pytest.CaptureFixture[str]
FEW = [
    "--devices-per-node",
    "2",
    "--tensor",
    "1",
    "--pipeline",
    "1",
    "--recompute",
    "job",
    "--accumulate",
    "1",
]
"""Options that leave few candidates, so that a search is short."""
ONE = [*FEW, "--strategy", "zero0"]


@pytest.fixture(scope="module")
def candidates(
    small_package: Package, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Plan]:
    """The command's output for scripts, and the plan that it writes."""
    folder = tmp_path_factory.mktemp("planned")
    with redirect_stdout(StringIO()) as out:
        assert (
            cli.run(
                [
                    "plan",
                    str(small_package.path),
                    "--device",
                    "l4",
                    *FEW,
                    "-o",
                    str(folder / "plan.json"),
                    "--json",
                ]
            )
            == 0
        )
    return json.loads(out.getvalue())["candidates"], Plan.model_validate_json(
        (folder / "plan.json").read_bytes()
    )


@pytest.fixture
def small(candidates: tuple[list[dict[str, Any]], Plan], tmp_path: Path) -> Path:
    """A device with slightly less memory than the smallest candidate needs."""
    least = min(each["peak_bytes"] - each["memory"]["reserved"] for each in candidates[0])
    path = tmp_path / "small.json"
    link = {"seconds": 1e-5, "bytes_per_second": 1e9}
    figures = {
        "name": "small",
        "kind": "cpu",
        "source": "made up",
        "memory_bytes": int(0.95 * least),
        "flops": {"float32": 1e9},
    }
    path.write_text(
        json.dumps({**figures, "memory_bytes_per_second": 1e9, "node": link, "network": link})
    )
    return path


def said(capsys: Capture, *arguments: object, status: int = 0) -> str:
    assert cli.run([str(each) for each in arguments]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_the_best_candidate_is_written(candidates: tuple[list[dict[str, Any]], Plan]) -> None:
    (best, *_), plan = candidates
    assert (plan.strategy, plan.tensor_ranks, plan.accumulate) == (
        best["strategy"],
        best["tensor"],
        best["accumulate"],
    )
    assert plan.cluster.device == "cuda"


def test_each_candidate_says_what_it_holds_and_takes(
    candidates: tuple[list[dict[str, Any]], Plan],
) -> None:
    for each in candidates[0]:
        assert sum(each["memory"].values()) == each["peak_bytes"]
        assert sum(each["time"].values()) == pytest.approx(each["seconds"])
        assert each["tensor"] * each["pipeline"] * each["data"] == 2


def test_the_table_has_a_line_for_each_and_says_why_the_first_wins(
    small_package: Package, capsys: Capture
) -> None:
    shown = said(capsys, "plan", small_package.path, "--device", "l4", *FEW)
    assert "1: the fastest that fits" in shown
    assert "2: " in shown
    assert "memory of 1: parameters" in shown
    assert "time of 1: compute" in shown


def test_a_candidate_is_explained_node_by_node(small_package: Package, capsys: Capture) -> None:
    told: dict[str, Any] = json.loads(
        said(capsys, "plan", small_package.path, "--device", "l4", *ONE, "--explain", "1", "--json")
    )
    assert set(told) == {"train.only", "train.update"}
    for graph in told.values():
        assert (
            graph["seconds"]
            >= max(node["start"] + node["seconds"] for node in graph["nodes"]) - 1e-12
        )


def test_the_explanation_names_what_binds_a_node(small_package: Package, capsys: Capture) -> None:
    shown = said(capsys, "plan", small_package.path, "--device", "l4", *ONE, "--explain", "1")
    assert "bound by" in shown
    assert "launch" in shown


def test_there_is_no_candidate_of_such_a_number(small_package: Package, capsys: Capture) -> None:
    assert "--explain 99: there are" in said(
        capsys, "plan", small_package.path, "--device", "l4", *ONE, "--explain", "99", status=2
    )


def test_an_explanation_wants_a_devices_figures(small_package: Package, capsys: Capture) -> None:
    assert "needs a device profile" in said(
        capsys, "plan", small_package.path, "--explain", "1", status=2
    )


def test_what_does_not_fit_says_by_how_much_and_where_it_would(
    small_package: Package, small: Path, tmp_path: Path, capsys: Capture
) -> None:
    options = ["--device", small, *FEW, "-o", tmp_path / "plan.json"]
    told = said(capsys, "plan", small_package.path, *options, status=2)
    assert "the package does not fit" in told
    assert "It fits on 2 x 2" in told
    assert not (tmp_path / "plan.json").exists()


def test_an_unknown_device_is_refused_by_those_that_there_are(
    small_package: Package, capsys: Capture
) -> None:
    assert "one of a10, a100, b200" in said(
        capsys, "plan", small_package.path, "--device", "tpu", *FEW, status=2
    )
