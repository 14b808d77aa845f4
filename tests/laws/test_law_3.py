"""Law 3: in fp32, 100 steps under any plan have the losses of a single process within 1e-5.

This includes dropout. Losses alone would not reveal a gradient that is scaled, since both the
optimizer and clipping normalise it. The gradients' norms are therefore compared too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.laws.runs import TOLERANCE, Run, curve, difference, train

import trainload
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.strategies import DIVIDES, SCHEDULES, Divide, Recompute, Strategy

pytestmark = pytest.mark.alone  # ranks that communicate many times in every step

STEPS = 100
FEWER = 24
"""Steps of plans that differ from another plan only in buckets or microbatches."""
SMALL = 6_000
"""Size of a bucket in bytes, small enough that there are several."""
TOGETHER: tuple[Strategy, ...] = ("zero1", "zero3")
"""Strategies that are combined with a tensor axis, on four workers."""
WHOLE = 10**9
ONE_EACH = 1


@pytest.fixture(scope="module")
def single(
    gpt: Package, gpt_source: Source, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of a single process."""
    folder = tmp_path_factory.mktemp("single")
    plan = trainload.plan(gpt_source, trainload.Cluster(), "single")
    train(1, [Run(folder / "run", gpt, plan, gpt_data, {"steps": STEPS})], folder)
    return folder / "run"


def test_the_run_of_one_process_learns(single: Path) -> None:
    """A run that learns nothing would not show a difference."""
    losses = curve(single)
    assert losses[-1] < losses[0] - 0.5


CHUNKED = "zero3, loss in chunks"
CASES: dict[str, tuple[Strategy | None, int, int, int]] = {
    "zero0": ("zero0", STEPS, 1, SMALL),
    "zero1": ("zero1", STEPS, 1, SMALL),
    "zero3": ("zero3", STEPS, 1, SMALL),
    "zero0, microbatches, one bucket": ("zero0", FEWER, 2, WHOLE),
    "zero1, microbatches, a bucket for each": ("zero1", FEWER, 2, ONE_EACH),
    "zero2, microbatches": ("zero2", FEWER, 2, SMALL),
    "zero3, microbatches, a bucket for each": ("zero3", FEWER, 2, ONE_EACH),
    "zero3, one bucket": ("zero3", FEWER, 1, WHOLE),
    "tensor": (None, STEPS, 1, SMALL),
    "tensor, microbatches": (None, FEWER, 2, SMALL),
    "sequence": (None, FEWER, 1, SMALL),
    "context": (None, FEWER, 1, SMALL),
    "1f1b": (None, STEPS, 4, SMALL),
    "zbv": (None, FEWER, 4, SMALL),
    CHUNKED: ("zero3", STEPS, 1, SMALL),
}
"""Case -> (strategy, steps, microbatches, bytes of a bucket).

Strategy None: both workers belong to a tensor axis, which divides what the case's name says, or to
a pipeline with the schedule of that name.
"""
PIPED: tuple[tuple[Strategy | None, dict[str, Any]], ...] = (
    ("zero3", {"pipeline_ranks": 2, "accumulate": 2, "recompute": "full"}),
    (
        "zero1",
        {"pipeline_ranks": 2, "accumulate": 4, "schedule": "zero-bubble", "stages_per_rank": 2},
    ),
    (None, {"pipeline_ranks": 2, "tensor_ranks": 2, "accumulate": 4}),
    (None, {"pipeline_ranks": 4, "accumulate": 8, "schedule": "gpipe"}),
)
"""Pipelines of four workers: (strategy, axes)."""
COMPILED: dict[str, tuple[int, Strategy | None, dict[str, Any]]] = {
    "zero0": (2, "zero0", {}),
    "zero1": (2, "zero1", {}),
    "zero2": (2, "zero2", {"accumulate": 2}),
    "zero3": (2, "zero3", {}),
    "tensor": (2, None, {"tensor_ranks": 2}),
    "sequence": (2, None, {"tensor_ranks": 2, "divide": "sequence"}),
    "context": (2, None, {"tensor_ranks": 2, "divide": "context"}),
    "1f1b": (2, None, {"pipeline_ranks": 2, "accumulate": 4}),
    "zbv": (2, None, {"pipeline_ranks": 2, "accumulate": 4, "schedule": "zbv"}),
    "zero3, loss in chunks": (2, "zero3", {"loss_chunks": 3}),
    "1f1b, loss in chunks": (2, None, {"pipeline_ranks": 2, "accumulate": 4, "loss_chunks": 3}),
    "tensor, loss in chunks": (2, None, {"tensor_ranks": 2, "loss_chunks": 3}),
    "zero3, offload": (2, "zero3", {"offload": 1.0}),
    "tensor, half offload": (2, None, {"tensor_ranks": 2, "offload": 0.5, "recompute": "full"}),
    "pipeline of zero3": (4, *PIPED[0]),
    "pipeline of two stages a rank": (4, *PIPED[1]),
    "pipeline of tensor": (4, *PIPED[2]),
}
"""Case -> (workers, strategy, axes)."""
FEW = 4
"""Steps of compiled runs."""


@pytest.fixture(scope="module")
def two_workers(
    gpt: Package, gpt_source: Source, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function: case -> its run by two processes, which starts on the first call."""

    @functools.cache
    def run_of(case: str) -> Path:
        strategy, steps, accumulate, bucket_bytes = CASES[case]
        cluster = trainload.Cluster(devices_per_node=2)
        what = case if case in DIVIDES else "tensor"
        axes: dict[str, Any] = (
            {"pipeline_ranks": 2, "schedule": case}
            if case in SCHEDULES
            else {"tensor_ranks": 2, "divide": what}
        )
        axes = {} if strategy is not None else axes
        axes |= {"loss_chunks": 3} if case == CHUNKED else {}
        plan = trainload.plan(
            gpt_source, cluster, strategy, accumulate=accumulate, bucket_bytes=bucket_bytes, **axes
        )
        assert (len(plan.buckets) > 4) == (bucket_bytes != WHOLE)
        folder = tmp_path_factory.mktemp("two")
        train(2, [Run(folder / "run", gpt, plan, gpt_data, {"steps": steps})], folder)
        return folder / "run"

    return run_of


of_each_axis = pytest.mark.matrix("zero3", "sequence", "zbv")


@of_each_axis
@pytest.mark.parametrize("case", CASES)
def test_two_workers_have_the_losses_of_one(
    single: Path, two_workers: Callable[[str], Path], case: str
) -> None:
    steps = CASES[case][1]
    found = difference(curve(single)[:steps], curve(two_workers(case)))
    print(f"{case}: {steps} losses differ by at most {found:.2g}")
    assert found <= TOLERANCE


@of_each_axis
@pytest.mark.parametrize("case", CASES)
def test_two_workers_have_the_gradients_of_one(
    single: Path, two_workers: Callable[[str], Path], case: str
) -> None:
    steps = CASES[case][1]
    assert (
        difference(
            curve(single, of="gradient_norm")[:steps], curve(two_workers(case), of="gradient_norm")
        )
        <= TOLERANCE
    )


@pytest.mark.slow
def test_four_workers_in_two_nodes_have_the_losses_of_one(
    gpt: Package, gpt_source: Source, gpt_data: Path, single: Path, tmp_path: Path
) -> None:
    cluster = trainload.Cluster(nodes=2, devices_per_node=2)
    plan = trainload.plan(gpt_source, cluster, "hybrid", accumulate=2, bucket_bytes=SMALL)
    assert (plan.shard_degree, plan.replicas) == (2, 2)
    (losses,) = train(4, [Run(tmp_path / "run", gpt, plan, gpt_data, {"steps": FEWER})], tmp_path)
    assert difference(curve(single)[:FEWER], losses) <= TOLERANCE
    assert (
        difference(
            curve(single, of="gradient_norm")[:FEWER], curve(tmp_path / "run", of="gradient_norm")
        )
        <= TOLERANCE
    )


@pytest.mark.slow
def test_recomputation_changes_no_bit(
    gpt: Package, gpt_source: Source, gpt_data: Path, tmp_path: Path
) -> None:
    cluster = trainload.Cluster(devices_per_node=2)
    runs: list[Run] = []
    axes: dict[Recompute, dict[str, Any]] = {
        "full": {"pipeline_ranks": 2, "accumulate": 2},
        "selective": {"tensor_ranks": 2},
    }
    for how, more in axes.items():
        for recompute in ("job", how):
            plan = trainload.plan(
                gpt_source, cluster, bucket_bytes=SMALL, recompute=recompute, **more
            )
            runs.append(Run(tmp_path / f"run{len(runs)}", gpt, plan, gpt_data, {"steps": 4}))
    kept, full, kept_too, selective = train(2, runs, tmp_path)
    assert (kept, kept_too) == (full, selective)


@pytest.mark.slow
def test_tensor_and_data_axis_together_have_the_losses_of_one(
    gpt: Package, gpt_source: Source, gpt_data: Path, single: Path, tmp_path: Path
) -> None:
    cluster = trainload.Cluster(nodes=2, devices_per_node=2)
    runs = []
    for number, strategy in enumerate(TOGETHER):
        what: Divide = "tensor" if strategy == "zero1" else "sequence"
        plan = trainload.plan(
            gpt_source,
            cluster,
            strategy,
            accumulate=2,
            bucket_bytes=SMALL,
            tensor_ranks=2,
            divide=what,
        )
        assert (plan.data_ranks, plan.tensor_ranks) == (2, 2)
        runs.append(Run(tmp_path / f"run{number}", gpt, plan, gpt_data, {"steps": FEWER}))
    for losses, run in zip(train(4, runs, tmp_path), runs, strict=True):
        assert difference(curve(single)[:FEWER], losses) <= TOLERANCE
        assert (
            difference(
                curve(single, of="gradient_norm")[:FEWER], curve(run.run_dir, of="gradient_norm")
            )
            <= TOLERANCE
        )


@pytest.mark.slow
def test_pipelines_of_four_workers_have_the_losses_of_one(
    gpt: Package,
    gpt_source: Source,
    gpt_data: Path,
    gpt_held_out: Path,
    single: Path,
    tmp_path: Path,
) -> None:
    cluster, runs = trainload.Cluster(devices_per_node=4), []
    for number, (strategy, axes) in enumerate(PIPED):
        plan = trainload.plan(gpt_source, cluster, strategy, bucket_bytes=SMALL, **axes)
        options = {"steps": FEWER, "eval_data": str(gpt_held_out), "eval_every": FEWER // 2}
        runs.append(Run(tmp_path / f"run{number}", gpt, plan, gpt_data, options))
    for losses, run in zip(train(4, runs, tmp_path), runs, strict=True):
        assert difference(curve(single)[:FEWER], losses) <= TOLERANCE
        assert (
            difference(
                curve(single, of="gradient_norm")[:FEWER], curve(run.run_dir, of="gradient_norm")
            )
            <= TOLERANCE
        )
    evaluated = [
        [event.data["loss"] for event in read_events(run.run_dir) if event.kind == "eval"]
        for run in runs
    ]
    assert all(difference(evaluated[0], each) <= TOLERANCE for each in evaluated[1:])


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_workers_have_the_losses_of_one(
    gpt: Package,
    gpt_source: Source,
    gpt_data: Path,
    gpt_held_out: Path,
    single: Path,
    tmp_path: Path,
    case: str,
) -> None:
    workers, strategy, axes = COMPILED[case]
    plan = trainload.plan(
        gpt_source,
        trainload.Cluster(devices_per_node=workers),
        strategy,
        bucket_bytes=SMALL,
        **axes,
    )
    options = {
        "steps": FEW,
        "eval_data": str(gpt_held_out),
        "eval_every": FEW // 2,
        "compile": True,
    }
    (losses,) = train(workers, [Run(tmp_path / "run", gpt, plan, gpt_data, options)], tmp_path)
    assert difference(curve(single)[:FEW], losses) <= TOLERANCE
    assert [
        event.data["message"] for event in read_events(tmp_path / "run") if event.kind == "warning"
    ] == []


def test_one_worker_that_accumulates_has_the_same_losses(
    gpt: Package, gpt_source: Source, gpt_data: Path, single: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(gpt_source, trainload.Cluster(), "single", accumulate=4)
    (losses,) = train(1, [Run(tmp_path / "run", gpt, plan, gpt_data, {"steps": FEWER})], tmp_path)
    assert difference(curve(single)[:FEWER], losses) <= TOLERANCE
