"""Step graphs are compared with the results of autograd, which are computed once."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.autograd_trace.step_graph_calls import CPU
from tests.capture.jobs import Batch, Model, job
from torch import nn

from trainload.autograd_trace.derivation import step_check as check
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.capture.job.definition import Job, Loss
from trainload.capture.parity.replays import Replayed
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError


def weighted(model: nn.Module, batch: Batch) -> Loss:
    out = model(batch["x"])
    return Loss(out.square().mean(), weight=(batch["x"] > 0).sum(), metrics={"largest": out.amax()})


def replayed(given: Job) -> tuple[Program, list[Replayed]]:
    kept: dict[str, list[Replayed]] = {}
    program = capture(given, replays=kept)
    return program, kept["train"]


@functools.cache
def replayed_once(loss: Any) -> tuple[Job, Program, list[Replayed]]:
    """Return a job with a read-only buffer and this loss or the default. No test changes it."""
    given = job(
        Model(lambda m, x: x + m.shift, shift=torch.ones(8)),
        **({"loss": loss} if loss is not None else {}),
    )
    return given, *replayed(given)


def test_what_autograd_gave_is_kept_of_every_batch_of_the_check() -> None:
    _, _, kept = replayed_once(None)
    assert [each.batch["x"].shape[0] for each in kept] == [5, 4]


@pytest.mark.parametrize(
    "model",
    [
        lambda: Model(drop=nn.Dropout(0.5), middle=lambda m, x: m.drop(x)),
        lambda: Model(norm=nn.BatchNorm1d(8), middle=lambda m, x: m.norm(x)),
    ],
)
def test_what_depends_on_a_generator_or_changes_a_buffer_is_not_kept(model: Any) -> None:
    _, kept = replayed(job(model()))
    assert kept == []


def test_a_buffer_that_is_only_read_does_not_matter() -> None:
    _, _, kept = replayed_once(None)
    assert len(kept) == 2


@pytest.mark.parametrize("loss", [None, weighted])
def test_nothing_is_computed_again_for_a_batch_that_was_replayed(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, program, kept = replayed_once(loss)
    step = derive(program, "train", CPU)
    monkeypatch.setattr(check, "_by_autograd", lambda *_: pytest.fail("computed again"))
    check_step(program, "train", step, dict(given.batch), kept)


def test_another_batch_is_computed() -> None:
    _, program, kept = replayed_once(None)
    wrong = [replace(each, outputs=tuple(value + 1 for value in each.outputs)) for each in kept]
    check_step(program, "train", derive(program, "train", CPU), {"x": torch.randn(4, 8)}, wrong)


@pytest.mark.parametrize("part", ["loss", "gradient", "weight"])
def test_a_step_graph_that_differs_from_what_was_replayed_is_refused(part: str) -> None:
    given, program, kept = replayed_once(weighted)
    step = derive(program, "train", CPU)
    names = ["loss", "weight", "largest"]
    wrong = []
    for each in kept:
        outputs = tuple(
            v * 1.01 if name == part else v for name, v in zip(names, each.outputs, strict=True)
        )
        gradients = {
            n: g * 1.01 if part == "gradient" and n == "last.bias" and g is not None else g
            for n, g in each.gradients.items()
        }
        wrong.append(Replayed(each.batch, outputs, gradients))
    with pytest.raises(CaptureError, match=f"differs from autograd in the {part}"):
        check_step(program, "train", step, dict(given.batch), wrong)


def test_a_missing_gradient_is_refused() -> None:
    given, program, kept = replayed_once(None)
    step = derive(program, "train", CPU)
    output = next(node for node in step.module.graph.nodes if node.op == "output")
    output.args = (output.args[0][:-1],)
    step.module.recompile()
    with pytest.raises(CaptureError, match="no gradient"):
        check_step(
            program, "train", replace(step, outputs=step.outputs[:-1]), dict(given.batch), kept
        )


def test_a_gradient_of_rounding_alone_may_be_other_rounding() -> None:
    """A constant added to all scores before a softmax has gradient 0, up to rounding errors."""
    torch.manual_seed(0)  # with other values, the rounding errors may be exactly 0
    program, kept = replayed(
        job(Model(lambda m, x: (x + m.added).softmax(-1), added=nn.Parameter(torch.tensor(0.1))))
    )
    step = derive(program, "train", CPU)
    for each in kept:
        rounding = each.gradients["added"]
        assert rounding is not None
        assert 0 < float(rounding.abs()) < 1e-6
        other = replace(each, gradients={**each.gradients, "added": rounding * -2})
        check_step(program, "train", step, each.batch, [other])
