"""The page of a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.made import Read

import trainload
from trainload.cli import main as cli
from trainload.core.formatting import size
from trainload.packaging.package import Package
from trainload.report.plans.plan_page import plan_page
from trainload.report.plans.rank_grid import grids_of
from trainload.sharding.planner.device import DeviceProfile, read
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import Found, Refused, search
from trainload.sharding.planner.verdicts import verdict_on
from trainload.sharding.plans.plan import NO_ESTIMATE, Cluster, Plan

REASON = "<img src=x> has no rule"


@pytest.fixture(scope="module")
def device() -> DeviceProfile:
    return read("h100")


@pytest.fixture(scope="module")
def found(gpt_source: Source, device: DeviceProfile) -> Found:
    """A search with three candidates, and one that could not be made."""
    cluster = Cluster(devices_per_node=2, device="cuda")
    result = search(gpt_source, cluster, device, exact=3)
    return Found(
        result.candidates, result.judged, (*result.refused, Refused("tensor 7", REASON)), device
    )


@pytest.fixture(scope="module")
def page(gpt: Package, gpt_source: Source, found: Found, device: DeviceProfile) -> str:
    """The page of the best plan of that search. No test changes it."""
    assert found.best is not None
    return plan_page(gpt, found.best.plan, device, found, gpt_source)


def test_every_candidate_is_listed_with_its_result(page: str, found: Found) -> None:
    texts = Read(page.replace("\xa0", " ")).texts
    assert [c for c in found.candidates if verdict_on(found, c) not in texts] == []
    assert texts.count("chosen") == 1


def test_a_plan_that_was_not_made_is_listed_with_its_reason(page: str) -> None:
    texts = Read(page).texts
    assert texts[texts.index("tensor 7") + 1] == REASON


def test_the_memory_chart_and_its_table_have_the_peak_of_the_plan(page: str, found: Found) -> None:
    assert found.best is not None
    memory = found.best.costs.memory
    assert f"at most {size(memory.tensors)}" in page
    assert f">{size(memory.peak)}</td>" in page


def test_the_timeline_has_compute_and_collectives(page: str) -> None:
    texts = Read(page).texts
    assert {"compute", "all_reduce", "forward", "backward", "update"} <= set(texts)


def test_names_in_the_page_are_there_once(page: str) -> None:
    names = Read(page).values("id")
    assert sorted(set(names)) == sorted(names)


def test_charts_have_the_pages_colors_alone(page: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert re.findall(r"#[0-9a-fA-F]{6}\b|rgb\(", drawn) == []


def test_a_plan_for_a_kind_of_device_has_memory_but_no_times(
    gpt: Package, gpt_source: Source
) -> None:
    plan = trainload.plan(gpt, Cluster(devices_per_node=2), "zero1")
    text = plan_page(gpt, plan, source=gpt_source)
    assert "There are no times" in text
    assert 'aria-label="every rank: at most ' in text


def test_each_rank_of_a_pipeline_has_a_chart_and_lanes(
    gpt: Package, gpt_source: Source, device: DeviceProfile
) -> None:
    cluster = Cluster(devices_per_node=2, device="cuda")
    plan = trainload.plan(gpt, cluster, pipeline_ranks=2, accumulate=2)
    texts = Read(plan_page(gpt, plan, device, source=gpt_source)).texts
    assert [texts.count(text) >= 1 for text in ("pipeline rank 0", "pipeline rank 1")] == [True] * 2
    assert {"0: compute", "1: compute"} <= set(texts)


def plan_of(nodes: int, devices: int, **options: Any) -> Plan:
    return Plan(
        package="ab" * 32,
        cluster=Cluster(nodes=nodes, devices_per_node=devices),
        strategy="hybrid" if "shard_ranks" in options else "zero3",
        global_batch=nodes * devices,
        buckets=(),
        estimate=NO_ESTIMATE,
        **options,
    )


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (plan_of(64, 8), 8),
        (plan_of(64, 8, tensor_ranks=4), 4),
        (plan_of(4, 8, shard_ranks=8), 8),
        (plan_of(1, 1), 1),
    ],
    ids=["data", "tensor", "hybrid", "one"],
)
def test_every_rank_is_in_the_grid_once(plan: Plan, columns: int) -> None:
    grids = grids_of(plan)
    ranks = [r for grid in grids for row in (*grid.first, *grid.others) for r in row.ranks]
    assert ranks == list(range(plan.world_size))
    assert {len(grid.columns) for grid in grids} == {columns}


def test_a_large_grid_is_bounded() -> None:
    (grid,) = grids_of(plan_of(100_000, 8))
    assert len(grid.first) + len(grid.others) == 512
    assert grid.left_out == 100_000 - 512


def test_the_command_writes_the_page_of_a_plan(
    tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    arguments = ["plan", str(tiny.path), "--device", "h100", "--html", str(path), "--json"]
    assert cli.run(arguments) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert f"the best {len(candidates)} simulated" in path.read_text()


def test_the_page_of_a_requested_plan_has_no_candidates(
    tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    assert cli.run(["plan", str(tiny.path), "--strategy", "single", "--html", str(path)]) == 0
    assert "page" in capsys.readouterr().out
    assert "The plan was requested, not searched for" in path.read_text()
