"""The batches with which a freeze compares a graph with eager."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, Model, job
from torch import Tensor, nn
from torch.export import Dim

from trainload.capture.parity.replays import Check, replay_batches
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError

SEQ = {"x": {1: Dim("seq", min=2, max=9)}, "y": {1: Dim("seq", min=2, max=9)}}


def tokens() -> Batch:
    return {"x": torch.randn(4, 6, 8), "y": torch.randint(0, 5, (4, 6))}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@functools.cache
def captured() -> tuple[Batch, Program]:
    """Return the example and the program of a job with a dynamic length."""
    batch = tokens()
    return batch, capture(job(Model(), batch=batch, loss=loss, dynamic=SEQ))


def sizes(check: Check) -> list[tuple[int, ...]]:
    batch, program = captured()
    found = replay_batches(program.graphs["train"], batch, check)
    assert all(each["x"].shape[:2] == each["y"].shape for each in found)
    assert all(
        set(each["y"].flatten().tolist()) <= set(batch["y"].flatten().tolist()) for each in found
    )
    return [tuple(each["y"].shape) for each in found]


def test_the_usual_ones_are_another_number_of_rows_and_the_example() -> None:
    assert sizes(Check.USUAL) == [(5, 6), (4, 6)]


def test_a_thorough_check_varies_every_dim_within_its_range() -> None:
    drawn = sizes(Check.THOROUGH)[:-2]
    assert len({rows for rows, _ in drawn}) > 2
    assert len({length for _, length in drawn}) > 2
    assert all(2 <= length <= 9 for _, length in drawn)


def short_only(m: Any, x: Tensor) -> Tensor:
    """Branch on the length; the graph always has the example's branch."""
    if m.training and not torch.compiler.is_exporting() and x.shape[1] > 6:
        return x * 2
    return x


def test_a_difference_at_another_length_is_found_by_a_thorough_check_alone() -> None:
    given = job(Model(short_only), batch=tokens(), loss=loss, dynamic=SEQ)
    capture(given)
    with pytest.raises(CaptureError, match=r"differs? from (those of )?eager mode"):
        capture(given, Check.THOROUGH)
