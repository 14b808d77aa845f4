"""Law 3: in fp32, 100 steps under any plan give the single-process losses within 1e-5, dropout and all.

Losses alone would not show a gradient of another length: the optimizer and the clipping both divide it out. So the gradients' norms are
compared too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.laws.runs import TOLERANCE, Run, curve, difference, train

import trainload
from trainload.packaging.read import Package
from trainload.sharding.plan import Strategy

STEPS = 100
FEWER = 40
"""Steps of the plans that differ from another one in buckets or microbatches only."""
SMALL = 6_000
"""Bytes of a bucket, so that there are several."""
WHOLE = 10**9
ONE_EACH = 1


@pytest.fixture(scope="module")
def single(gpt: Package, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("single")
    plan = trainload.plan(gpt, trainload.Cluster(), "single")
    (losses,) = train(1, [Run(folder / "run", gpt, plan, gpt_data, {"steps": STEPS})], folder)
    assert losses[-1] < losses[0] - 0.5, "a run that learns nothing shows no difference"
    return folder / "run"


@pytest.mark.parametrize(
    ("strategy", "steps", "accumulate", "bucket_bytes"),
    [
        ("zero0", STEPS, 1, SMALL),
        ("zero1", STEPS, 1, SMALL),
        ("zero3", STEPS, 1, SMALL),
        ("zero0", FEWER, 2, WHOLE),
        ("zero1", FEWER, 2, ONE_EACH),
        ("zero2", FEWER, 2, SMALL),
        ("zero3", FEWER, 2, ONE_EACH),
        ("zero3", FEWER, 1, WHOLE),
    ],
)
def test_two_workers_have_the_losses_of_one(
    gpt: Package, gpt_data: Path, single: Path, tmp_path: Path, strategy: Strategy, steps: int, accumulate: int, bucket_bytes: int
) -> None:
    cluster = trainload.Cluster(devices_per_node=2)
    plan = trainload.plan(gpt, cluster, strategy, accumulate=accumulate, bucket_bytes=bucket_bytes)
    assert (len(plan.buckets) > 4) == (bucket_bytes != WHOLE)
    (losses,) = train(2, [Run(tmp_path / "run", gpt, plan, gpt_data, {"steps": steps})], tmp_path)
    found = difference(curve(single)[:steps], losses)
    norms = difference(curve(single, of="gradient_norm")[:steps], curve(tmp_path / "run", of="gradient_norm"))
    what = f"{steps} losses differ by at most {found:.2g}, norms by {norms:.2g}"
    print(f"{strategy}, accumulate {accumulate}, {len(plan.buckets)} buckets: {what}")
    assert found <= TOLERANCE
    assert norms <= TOLERANCE


def test_four_workers_in_two_nodes_have_the_losses_of_one(gpt: Package, gpt_data: Path, single: Path, tmp_path: Path) -> None:
    cluster = trainload.Cluster(nodes=2, devices_per_node=2)
    plan = trainload.plan(gpt, cluster, "hybrid", accumulate=2, bucket_bytes=SMALL)
    assert (plan.shard_degree, plan.replicas) == (2, 2)
    (losses,) = train(4, [Run(tmp_path / "run", gpt, plan, gpt_data, {"steps": FEWER})], tmp_path)
    assert difference(curve(single)[:FEWER], losses) <= TOLERANCE
    assert difference(curve(single, of="gradient_norm")[:FEWER], curve(tmp_path / "run", of="gradient_norm")) <= TOLERANCE


def test_one_worker_that_accumulates_has_the_same_losses(gpt: Package, gpt_data: Path, single: Path, tmp_path: Path) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(), "single", accumulate=4)
    (losses,) = train(1, [Run(tmp_path / "run", gpt, plan, gpt_data, {"steps": FEWER})], tmp_path)
    assert difference(curve(single)[:FEWER], losses) <= TOLERANCE
