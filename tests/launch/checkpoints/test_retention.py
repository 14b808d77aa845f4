"""Retention of checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.launch.checkpoint_cases import DATA, make_plan, make_state
from tests.launch.tiny import token_rows

import trainload
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.index import published
from trainload.launching.checkpoints.retention import Retention
from trainload.launching.checkpoints.writer import EVALUATION, CheckpointWriter
from trainload.packaging.package import Package

ONE = make_plan("single", 1)
FOUND = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.5}


@pytest.mark.parametrize(
    ("keep", "doomed"),
    [
        (Retention(2), [10, 20, 30]),
        (Retention(1), [10, 20, 30, 40]),
        (Retention(9), []),
        (Retention(1, best=1), [10, 30, 40]),
        (Retention(1, best=2), [10, 30]),
        (Retention(1, best=9), [30]),
        (Retention(1, every=20), [10, 30]),
        (Retention(1, best=1, every=30), [10, 40]),
    ],
)
def test_those_are_deleted_that_nobody_wants(keep: Retention, doomed: list[int]) -> None:
    assert keep.doomed(FOUND) == doomed


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    assert Retention(1, best=1).doomed({1: float("nan"), 2: 5.0, 3: None}) == [1]


@pytest.mark.parametrize(
    "keep",
    [Retention(2), Retention(1, best=2), Retention(1, every=30), Retention(2, best=1, every=20)],
)
def test_there_are_never_more_than_were_reckoned_with(keep: Retention) -> None:
    kept: dict[int, float | None] = {}
    for step in range(10, 210, 10):
        kept[step] = 1000.0 - step
        for doomed in keep.doomed(kept):
            del kept[doomed]
        assert len(kept) <= keep.most(step // 10, 10)


def test_a_writer_keeps_the_best_by_what_checkpoints_say_of_themselves(tmp_path: Path) -> None:
    writer = CheckpointWriter(place_of(tmp_path), ONE, 0, "t1", keep=Retention(1, best=1))
    for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0), (4, None)):
        writer.save(step, make_state(ONE, 0), DATA, {} if loss is None else {EVALUATION: loss})
        writer.wait()
    assert list(published(tmp_path)) == [2, 4]


def test_a_run_keeps_what_it_was_asked_to(tiny: Package, tiny_data: Path, tmp_path: Path) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    # training increases this loss, so the last checkpoints are not the best
    np.savez(tmp_path / "held-out.npz", tokens=token_rows(21)[:, ::-1])
    result = trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=tmp_path / "run",
        steps=8,
        checkpoint_every=1,
        eval_data=tmp_path / "held-out.npz",
        eval_every=2,
        keep=1,
        keep_best=2,
        keep_every=3,
        compile=False,
        backend="local",
    )
    losses = {entry["step"]: entry["loss"] for entry in result.evaluations if entry["step"] > 0}
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert best == [2, 4]
    assert set(published(tmp_path / "run")) == {8, *best, 3, 6}
