"""The page of a package."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.launch.commands import refused
from tests.report.made import Read, made_run

import trainload
from trainload.cli import main as cli
from trainload.packaging.format.debug import read_debug, write_debug
from trainload.packaging.format.source_map import NAME
from trainload.packaging.package import Package
from trainload.report.packages.graph_page import package_page
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import Plan
from trainload.sharding.rewriting.forward_values import Forward
from trainload.transforms.listing import module_lines

EVIL = """</code><script>alert(1)</script>"><img src=http://evil.example/x onerror=alert(2)>"""


@pytest.fixture(scope="module")
def page(gpt: Package) -> tuple[str, dict[str, dict[str, float]]]:
    """The page of the laws' GPT, and its summary. No test changes them."""
    text, graphs = package_page(gpt)
    return text, graphs


@pytest.fixture(scope="module")
def plan(gpt_source: Source) -> Plan:
    return trainload.plan(
        gpt_source.package,
        trainload.Cluster(devices_per_node=4),
        "zero3",
        tensor_ranks=2,
        recompute="full",
    )


@pytest.fixture(scope="module")
def planned(gpt: Package, plan: Plan) -> tuple[str, dict[str, dict[str, float]]]:
    """The page of the laws' GPT under a plan, and its summary. No test changes them."""
    text, graphs = package_page(gpt, plan)
    return text, graphs


def test_every_operator_is_in_the_page(gpt: Package, page: tuple[str, object]) -> None:
    shown = set(Read(page[0]).texts)
    lines = module_lines(gpt, "train", "")
    assert [line.text for line in lines if line.text.strip() not in shown] == []


def test_operators_are_beside_their_source_line(page: tuple[str, object]) -> None:
    texts = Read(page[0]).texts
    line = "x = x + self.dropout(self.attend(self.norms[0](x)))"
    at = [at for at, text in enumerate(texts) if text == line]
    assert {re.sub(r"\d+", "N", texts[each + 1]) for each in at} == {"gpt.py:N"}
    assert any("= aten.linear.default(" in texts[each + 2] for each in at)


def test_every_module_is_a_part_that_opens(gpt: Package, page: tuple[str, object]) -> None:
    found = Read(page[0])
    modules = {line.module.rpartition(".")[2] for line in module_lines(gpt, "train", "")}
    names = set(re.findall(r"<summary><b>([^<]+)</b>", page[0]))
    assert {name for name in modules if name and not name.startswith("_")} <= names
    assert found.tags.count("details") == found.tags.count("summary")


def test_operations_are_those_of_the_step_graph(
    gpt_source: Source, page: tuple[str, dict[str, dict[str, float]]]
) -> None:
    nodes = gpt_source.steps(["train"])["train"].module.graph.nodes
    told = page[1]["train"]
    expected = sum(flops(node) for node in nodes if node.op == "call_function")
    assert told["forward_flops"] + told["backward_flops"] == expected


def test_kept_bytes_are_those_of_the_step_graph(
    gpt_source: Source, page: tuple[str, dict[str, dict[str, float]]]
) -> None:
    spans = Forward(gpt_source.steps(["train"])["train"]).spans.values()
    assert page[1]["train"]["saved_bytes"] == sum(span.bytes for span in spans if span.is_kept)


def test_parameters_are_counted_once(
    gpt: Package, page: tuple[str, dict[str, dict[str, float]]]
) -> None:
    owned = [p for p in gpt.parameters if p.alias_of is None]
    expected = sum(torch.Size(parameter.shape).numel() for parameter in owned)
    assert page[1]["train"]["parameters"] == expected


def test_a_plan_that_recomputes_keeps_less(
    page: tuple[str, dict[str, dict[str, float]]],
    planned: tuple[str, dict[str, dict[str, float]]],
) -> None:
    assert page[1]["train"]["recomputed"] == 0
    assert planned[1]["train"]["recomputed"] > 0
    assert planned[1]["train"]["saved_bytes"] < page[1]["train"]["saved_bytes"]


def test_a_plan_says_how_parameters_are_divided(planned: tuple[str, object], plan: Plan) -> None:
    texts = Read(planned[0]).texts
    assert texts.count("dim 0 over 2 ranks") == sum(
        str(shard) == "dim 0" for shard in plan.tensor_shards.values()
    )


def test_the_buckets_of_a_plan_are_listed(planned: tuple[str, object], plan: Plan) -> None:
    texts = Read(planned[0]).texts
    section = texts[texts.index("Buckets of the plan") :]
    assert [bucket.name for bucket in plan.buckets if bucket.name not in section] == []


def test_a_plan_of_another_package_is_rejected(tiny: Package, plan: Plan) -> None:
    with pytest.raises(trainload.PlanError, match="the plan is for another package"):
        package_page(tiny, plan)


def test_a_browser_runs_the_pages_own_script_alone(page: tuple[str, object]) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", page[0], re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (v for v in Read(page[0]).values("content") if v.startswith("default-src 'none'"))
    assert policy.endswith(f"; script-src 'sha256-{digest}'")
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_the_search_is_hidden_until_the_script_shows_it(page: tuple[str, object]) -> None:
    assert '<form class="search" role="search" hidden>' in page[0]


def test_it_loads_nothing(page: tuple[str, object]) -> None:
    found = Read(page[0])
    links = [value for name in ("src", "href") for value in found.values(name)]
    assert links == ["data:,"]


@pytest.fixture(scope="module")
def hostile(tiny: Package, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a package whose modules, files and source lines attempt to inject HTML."""
    folder = tmp_path_factory.mktemp("hostile") / EVIL.replace("/", "")
    shutil.copytree(tiny.path, folder)
    document = read_debug(folder, NAME)
    document["files"] = [[f"{EVIL}\n", EVIL] for _ in document["files"]]
    document["graphs"] = {
        graph: {node: [EVIL, 0, 1, EVIL] for node in nodes}
        for graph, nodes in document["graphs"].items()
    }
    shutil.rmtree(folder / "debug")
    write_debug(folder, {NAME: document})
    return package_page(trainload.open(folder))[0]


def test_strings_of_a_package_stay_texts(hostile: str) -> None:
    found = Read(hostile)
    assert "img" not in found.tags
    assert found.tags.count("script") == 1
    assert [name for _, name, _ in found.attributes if name.startswith("on")] == []
    assert found.text.count(EVIL) >= 3


def test_the_command_writes_the_page_of_a_package(
    tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.html"
    assert cli.run(["report", str(tiny.path), "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["digest"] == tiny.digest
    assert told["bytes"] == path.stat().st_size
    assert told["graphs"]["train"]["operators"] == len(module_lines(tiny, "train", ""))


def test_no_page_is_written_into_a_package(
    tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "tiny.tl"
    shutil.copytree(tiny.path, package)
    line = refused(["report", package, "-o", package / "page.html"], tmp_path, capsys)
    assert "the path is in a package, which may have no other files" in line


def test_a_plan_is_for_the_page_of_a_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "run", [])
    line = refused(["report", tmp_path / "run", "--plan", tmp_path / "p.json"], tmp_path, capsys)
    assert "--plan is for the page of a package" in line
