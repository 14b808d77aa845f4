"""A build that was made without a run is loaded by runs, which then compile nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.packaging.signers import Signers

import trainload
from trainload.core.errors import (
    IntegrityError,
    PlanError,
    PolicyError,
    RequestError,
    StorageError,
)
from trainload.launching.api import verified_build
from trainload.launching.api.make_build import BuildReport
from trainload.packaging.builds.build_folder import (
    copy_parts,
    file_entries,
    read_build,
    write_build,
)
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


def for_gpus(package: Package) -> Plan:
    return trainload.plan(package, trainload.Cluster(device="cuda"), "single")


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        (None, RequestError, "this machine has no GPU"),
        ("cpu", RequestError, "devices of another kind"),
        ("mi300x", RequestError, "does not say what graphs are compiled for"),
        ("h1000", PlanError, "there is no such device"),
        pytest.param(
            "h100",
            RequestError,
            "torch's build for CUDA",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA"),
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_cannot_be_compiled_for_is_refused(
    tiny: Package, tmp_path: Path, device: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainload.build(tiny, for_gpus(tiny), tmp_path / "tiny.build", device=device)


def test_a_plan_for_cpus_is_not_built_for_a_gpu(tiny: Package, tmp_path: Path) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    with pytest.raises(RequestError, match="devices of another kind"):
        trainload.build(tiny, plan, tmp_path / "tiny.build", device="h100")


@pytest.fixture(scope="module")
def unverified(
    published: Published, tiny: Package, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Build of the tiny package without comparisons, as a machine without the device makes it."""
    folder = tmp_path_factory.mktemp("unverified")
    record, _ = read_build(published.report.path)
    parts = copy_parts(published.report.path, record, folder / "parts")
    for part in parts.values():
        shutil.rmtree(part / "verified")
    without = record.model_copy(
        update={"unverified": record.compiled, "files": file_entries(parts)}
    )
    write_build(folder / "tiny.build", without, parts)
    return folder / "tiny.build"


def test_a_build_is_verified_without_compiling(
    unverified: Path, published: Published, tiny: Package, tmp_path: Path, compiled: list[str]
) -> None:
    report = trainload.verify_build(unverified, tiny, published.plan, tmp_path / "verified.build")
    assert (report.unverified, report.graphs, compiled) == ((), 3, [])


def test_comparisons_of_its_maker_do_not_count(
    published: Published, tiny: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_build, "compare_parts", lambda *_, **__: [])
    report = trainload.verify_build(
        published.report.path, tiny, published.plan, tmp_path / "verified.build"
    )
    assert len(report.unverified) == 3


def test_graphs_of_a_pipeline_are_not_verified(
    unverified: Path, tiny: Package, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(devices_per_node=2), pipeline_ranks=2)
    with pytest.raises(RequestError, match="cannot be compared by one process"):
        trainload.verify_build(unverified, tiny, plan, tmp_path / "verified.build")


def test_a_build_for_another_plan_is_not_verified(
    unverified: Path, tiny: Package, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(devices_per_node=2), "zero3")
    with pytest.raises(RequestError, match="not for this package, plan and machine"):
        trainload.verify_build(unverified, tiny, plan, tmp_path / "verified.build")


def test_a_damaged_build_is_not_loaded_to_verify_it(
    unverified: Path, published: Published, tiny: Package, tmp_path: Path
) -> None:
    damaged = shutil.copytree(unverified, tmp_path / "damaged.build")
    with (damaged / "0" / "train.only.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(IntegrityError, match="damaged"):
        trainload.verify_build(damaged, tiny, published.plan, tmp_path / "verified.build")


def test_a_build_of_a_maker_without_trust_is_not_loaded_to_verify_it(
    unverified: Path,
    published: Published,
    tiny: Package,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLOAD_POLICY", str(published.policy))
    with pytest.raises(PolicyError, match="does not trust the build's maker"):
        trainload.verify_build(unverified, tiny, published.plan, tmp_path / "verified.build")
