"""The demo's job, loaded as a user would load it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from tests.house.source import ROOT

from trainload import Job
from trainload.capture.job.definition import Loss
from trainload.freezing.load_job import load_job


@pytest.fixture(scope="module")
def load() -> Iterator[pytest.MonkeyPatch]:
    """Make the example's modules importable, and forget them afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield patch
        for name in ("job", "model"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def job(load: pytest.MonkeyPatch) -> Job:
    return load_job(f"{ROOT}/examples/gpt/job.py:job")


@pytest.fixture(scope="module")
def job_fp32(load: pytest.MonkeyPatch) -> Job:
    return load_job(f"{ROOT}/examples/gpt/job.py:job_fp32")


def loss_of(job: Job) -> Loss:
    assert job.loss is not None
    torch.manual_seed(0)
    loss = job.loss(job.model, dict(job.batch))
    assert isinstance(loss, Loss)
    return loss


def test_the_model_has_one_to_four_million_parameters(job: Job) -> None:
    assert 1_000_000 <= sum(parameter.numel() for parameter in job.model.parameters()) <= 4_000_000


def test_the_embeddings_are_tied(job: Job) -> None:
    assert job.model.get_parameter("head.weight") is job.model.get_parameter("tokens.weight")


def test_only_matrices_are_decayed(job: Job) -> None:
    assert job.optimizer is not None
    optimizer = job.optimizer(job.model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    groups = optimizer.param_groups
    assert {
        (p.ndim >= 2, group["weight_decay"] > 0) for group in groups for p in group["params"]
    } == {(True, True), (False, False)}


def test_the_optimizer_has_every_parameter_once(job: Job) -> None:
    assert job.optimizer is not None
    optimizer = job.optimizer(job.model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in job.model.parameters())


def test_a_new_model_knows_nothing(job: Job) -> None:
    assert 5.3 < loss_of(job).value.item() < 5.8


def test_accuracy_has_no_gradient(job: Job) -> None:
    assert not loss_of(job).metrics["accuracy"].requires_grad


def test_both_forms_start_from_the_same_weights(job: Job, job_fp32: Job) -> None:
    ours = dict(job_fp32.model.named_parameters())
    assert all(
        torch.equal(parameter, ours[name]) for name, parameter in job.model.named_parameters()
    )


def test_the_autocast_region_is_what_differs_between_the_forms(job: Job, job_fp32: Job) -> None:
    one, other = loss_of(job).value.item(), loss_of(job_fp32).value.item()
    assert one != other
    assert abs(one - other) < 1e-2
