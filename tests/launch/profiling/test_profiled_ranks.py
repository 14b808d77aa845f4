"""Profiles of several ranks: on Ray, in a pipeline, and under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.profiling.profiled import MANY_STEPS, ranges_of, while_it_runs
from tests.laws.runs import Run, ranks
from tests.waiting import wait_until

import trainload
from trainload.launching.api.profile_run import Profile
from trainload.launching.profiling.profile_result import InterpretedProfile, Kind, MemoryUse
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.working_copy import request
from trainload.packaging.package import Package

CLUSTER = trainload.Cluster(devices_per_node=2)


def interpreted_of(profile: Profile, rank: int) -> InterpretedProfile:
    found = profile.ranks[rank].interpreted
    assert found is not None
    return found


def memory_of(profile: Profile, rank: int, kind: Kind) -> MemoryUse:
    return next(each for each in interpreted_of(profile, rank).memory if each.kind is kind)


@pytest.fixture(scope="module")
def sharded(
    ray_cluster: None, gpt: Package, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Profile]:
    """A run under ZeRO-3 on Ray, and the profile of both of its ranks."""
    run_dir = tmp_path_factory.mktemp("sharded") / "run"
    plan = trainload.plan(gpt, CLUSTER, "zero3")

    def ask() -> Profile:
        return trainload.profile(run_dir, steps=2, rank=(0, 1))

    return run_dir, while_it_runs(ask, gpt, plan, gpt_data, run_dir)


def test_each_rank_has_a_trace_of_the_same_steps(sharded: tuple[Path, Profile]) -> None:
    _, profile = sharded
    for rank in (0, 1):
        ranges = ranges_of(Path(profile.folder) / f"rank-{rank}.trace.json.gz")
        steps = [name for name in ranges if name.startswith("step ")]
        assert steps == [f"step {profile.step}", f"step {profile.step + 1}"]


def test_parameters_are_gathered(sharded: tuple[Path, Profile]) -> None:
    _, profile = sharded
    for rank in (0, 1):
        assert memory_of(profile, rank, Kind.GATHERED).most > 0
        parameters = memory_of(profile, rank, Kind.PARAMETERS)
        assert parameters.most == parameters.estimate


def test_collectives_are_apart_from_lines(sharded: tuple[Path, Profile]) -> None:
    _, profile = sharded
    calls = {each.operator: each.calls for each in interpreted_of(profile, 1).collectives}
    assert calls["all_gather_into_tensor"] > 0
    assert calls["reduce_scatter_tensor"] > 0


@pytest.mark.slow
def test_a_profile_does_not_change_a_run_on_ray(
    sharded: tuple[Path, Profile], gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    run_dir, profile = sharded
    steps = profile.step + 1
    plan = trainload.plan(gpt, CLUSTER, "zero3")
    trainload.launch(gpt, plan, gpt_data, run_dir=tmp_path / "run", steps=steps, compile=False)
    own = losses(read_events(run_dir))
    assert len(own) >= steps
    assert losses(read_events(tmp_path / "run")) == own[:steps]


@pytest.mark.slow
def test_the_stages_of_a_pipeline_are_profiled(
    ray_cluster: None, gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(gpt, CLUSTER, pipeline_ranks=2)

    def ask() -> Profile:
        return trainload.profile(tmp_path / "run", steps=1, rank=(0, 1))

    profile = while_it_runs(ask, gpt, plan, gpt_data, tmp_path / "run")
    for rank in (0, 1):
        found = interpreted_of(profile, rank)
        assert any(each.forward for each in found.lines)
        assert any(each.backward for each in found.lines)
        assert memory_of(profile, rank, Kind.ACTIVATIONS).most > 0


def test_ranks_of_torchrun_are_profiled(gpt: Package, gpt_data: Path, tmp_path: Path) -> None:
    plan = trainload.plan(gpt, CLUSTER, "zero3")
    run_dir = tmp_path / "run"
    run = Run(run_dir, gpt, plan, gpt_data, {"steps": MANY_STEPS})
    with ranks(2, [run], tmp_path) as started:
        wait_until(has_step(run_dir))
        profile = trainload.profile(run_dir, steps=1, rank=1)
        request(run_dir, Request.STOP)
        wait_until(lambda: all(process.exitcode is not None for process in started))
    (rank,) = profile.ranks
    assert rank.rank == 1
    assert rank.interpreted is not None
    assert (Path(profile.folder) / "rank-1.trace.json.gz").is_file()
    assert not (Path(profile.folder) / "rank-0.trace.json.gz").exists()


def has_step(run_dir: Path) -> Callable[[], bool]:
    def has_stepped() -> bool:
        return run_dir.exists() and any(event.kind == "step" for event in read_events(run_dir))

    return has_stepped
