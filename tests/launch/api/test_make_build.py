"""A build that was made without a run is loaded by runs, which then compile nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.signers import Signers

import trainload
from trainload.core.errors import StorageError
from trainload.launching.api.make_build import BuildReport
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan
from trainload.sharding.plans.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Published:
    """A release of the tiny package, and a build of it, in one store."""

    reference: str
    plan: Plan
    report: BuildReport
    policy: Path


@pytest.fixture(scope="module")
def published(
    tiny: Package, signers: Signers, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    folder = tmp_path_factory.mktemp("published")
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    report = trainload.build(tiny, plan, folder / "tiny.build")
    trainload.push(tiny.path, folder / "store")
    trainload.sign(folder / "tiny.build", signers.alice.key)
    trainload.push_build(folder / "tiny.build", folder / "store")
    policy = folder / "policy.toml"
    policy.write_text(f'build_makers = ["{signers.alice.public}"]\n')
    return Published(f"{folder / 'store'}#main/1", plan, report, policy)


def test_every_graph_is_compared(published: Published) -> None:
    assert published.report.graphs == 3
    assert published.report.unverified == ()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_graphs_with_collectives_are_compared(
    tiny: Package, tmp_path: Path, strategy: Strategy
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(devices_per_node=2), strategy, accumulate=2)
    assert trainload.build(tiny, plan, tmp_path / "tiny.build").unverified == ()


def train(published: Published, data: Path, run_dir: Path, **options: Any) -> None:
    """Train the release for two steps in this process."""
    package = trainload.open(published.reference)
    trainload.launch(
        package, published.plan, data, run_dir=run_dir, steps=2, backend="local", **options
    )


def test_a_run_in_an_empty_cache_compiles_nothing(
    published: Published,
    tiny_data: Path,
    compiled: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    train(
        published,
        tiny_data,
        tmp_path / "run",
        eval_data=tiny_data,
        policy=published.policy,
        require_compiled=True,
    )
    assert compiled == []


@pytest.mark.slow
def test_a_run_whose_policies_trust_no_maker_compiles(
    published: Published,
    tiny_data: Path,
    compiled: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    train(published, tiny_data, tmp_path / "run")
    assert compiled == ["train.only", "train.update"]


@pytest.mark.slow
def test_the_graphs_of_a_pipeline_are_not_compared_by_one_rank(
    tiny: Package, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(devices_per_node=2), pipeline_ranks=2)
    report = trainload.build(tiny, plan, tmp_path / "tiny.build")
    record = json.loads((tmp_path / "tiny.build" / "build.json").read_bytes())
    assert set(report.unverified) == set(record["compiled"])


def test_a_path_that_exists_is_refused_at_once(
    tiny: Package, tmp_path: Path, compiled: list[str]
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    with pytest.raises(StorageError, match="exists already"):
        trainload.build(tiny, plan, tmp_path)
    assert compiled == []
