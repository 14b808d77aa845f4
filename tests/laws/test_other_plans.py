"""Laws 3 and 4 together: a run that is resumed under different plans has uninterrupted losses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.laws.runs import TOLERANCE, Run, curve, difference, train

import trainload
from trainload.launching.checkpoints.index import published
from trainload.packaging.package import Package

pytestmark = pytest.mark.slow

STEPS = 20
EVERY = 4


def test_a_run_goes_on_under_one_plan_after_another(
    gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    """The run has five plans, each of which resumes from a checkpoint of the previous one.

    They are ZeRO-3 on four ranks, a tensor axis of two, one process, a pipeline of two, and ZeRO-3
    with a context axis of two.
    """
    folder = tmp_path / "run"
    options = {"steps": STEPS, "checkpoint_every": EVERY, "keep": STEPS}
    one, two, four = (trainload.Cluster(devices_per_node=count) for count in (1, 2, 4))
    (whole,) = train(
        1,
        [Run(tmp_path / "whole", gpt, trainload.plan(gpt, one), gpt_data, {"steps": STEPS})],
        tmp_path,
    )
    train(4, [Run(folder, gpt, trainload.plan(gpt, four, "zero3"), gpt_data, options)], tmp_path)
    plans = [
        trainload.plan(gpt, two, tensor_ranks=2),
        trainload.plan(gpt, one),
        trainload.plan(gpt, two, pipeline_ranks=2),
        trainload.plan(gpt, four, "zero3", tensor_ranks=2, divide="context", bucket_bytes=6_000),
    ]
    for number, plan in enumerate(plans, 1):
        for step, checkpoint in published(folder).items():
            if step > number * EVERY:
                shutil.rmtree(checkpoint)
        train(
            plan.world_size,
            [Run(folder, resume={"plan": plan.model_dump(mode="json")})],
            tmp_path,
            once=False,
        )
    found = difference(whole, curve(folder, once=False))
    print(f"{STEPS} losses under five plans differ by at most {found:.2g}")
    assert found <= TOLERANCE
    assert (
        difference(
            curve(tmp_path / "whole", of="gradient_norm"),
            curve(folder, of="gradient_norm", once=False),
        )
        <= TOLERANCE
    )
