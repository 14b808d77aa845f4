"""Inputs whose rows are not in the leading dim, and inputs shared by all rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.jobs import job, sgd
from torch import Tensor, nn
from torch.export import Dim

import trainload
from trainload import Job, JobError
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.job.leading_rows import arranged
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.launching.run.journal import losses, read_events

ROWS, STEPS = 4, 3
WEIGHT = torch.tensor([0.5, 1.0, 2.0])


class Recurrent(nn.Module):
    """Classifier of sequences with an initial state as input, whose rows are in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.GRU(6, 5, 2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(x, state.view(2, -1, 5))[0][:, -1])
        return found


def weighted(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    scores = model(batch["x"], batch["state"])
    each = nn.functional.cross_entropy(
        scores, batch["y"], batch["loss"]["weight"], reduction="none"
    )
    found: Tensor = each.mean() * batch["loss"]["scale"]
    return found


def example(rows: int = ROWS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 7, 6, generator=generator),
        "y": torch.randint(0, 3, (rows,), generator=generator),
        "state": torch.randn(2, rows, 5, generator=generator),
        "loss": {"weight": WEIGHT.clone(), "scale": torch.tensor(0.7)},
    }


def recurrent(**options: Any) -> Job:
    declared = {"dynamic": {"state": {1: Dim("batch")}}, "shared": ["loss"]}
    return Job(
        Recurrent(),
        example(),
        sgd,
        loss=weighted,
        steps=STEPS,
        global_batch=ROWS,
        **(declared | options),
    )


@pytest.mark.slow
def test_a_job_with_both_trains_as_in_eager(tmp_path: Path) -> None:
    data = example(1)  # the same row is repeated, so that the order does not matter
    columns = {
        "x": data["x"].numpy(),
        "y": data["y"].numpy(),
        "state": data["state"].movedim(1, 0).numpy(),
    }
    np.savez(
        tmp_path / "rows.npz",
        **{name: column.repeat(ROWS * STEPS, 0) for name, column in columns.items()},
    )
    package = trainload.freeze(recurrent(), tmp_path / "job.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single", accumulate=2)
    trainload.launch(
        package,
        plan,
        tmp_path / "rows.npz",
        run_dir=tmp_path / "run",
        backend="local",
        compile=False,
    )
    model, expected = Recurrent(), []
    optimizer = sgd(model)
    batch = data | {
        "x": data["x"].repeat(ROWS, 1, 1),
        "y": data["y"].repeat(ROWS),
        "state": data["state"].repeat(1, ROWS, 1),
    }
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = weighted(model, batch)
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        expected.append(value.item())
    assert losses(read_events(tmp_path / "run")) == pytest.approx(expected, rel=1e-5)


def test_a_package_has_the_rows_first_and_no_shared_input() -> None:
    shapes = {spec.name: spec.shape for spec in capture(recurrent()).graphs["train"].inputs}
    assert shapes == {"x": ("batch", 7, 6), "y": ("batch",), "state": ("batch", 2, 5)}


def test_the_values_of_a_shared_input_are_those_at_the_freeze() -> None:
    given_job = recurrent()
    program = capture(given_job)
    given_job.batch["loss"]["weight"].zero_()
    assert any(torch.equal(constant, WEIGHT) for constant in program.constants.values())


def test_each_variant_has_its_own_shared_input() -> None:
    def masked(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found: Tensor = (model(batch["x"]) * batch["mask"]).square().mean()
        return found

    batches = {
        "batch": {"x": torch.randn(4, 8), "mask": torch.ones(8)},
        "long": {"x": torch.randn(4, 3, 8), "mask": torch.zeros(3, 1)},
    }
    program = capture(
        job(
            nn.Linear(8, 8),
            batch=batches["batch"],
            variants={"long": batches["long"]},
            loss=masked,
            shared=["mask"],
        )
    )
    held = {name.partition("/")[0]: tuple(value.shape) for name, value in program.constants.items()}
    assert held["train"] == (8,) and held["train-long"] == (3, 1)


def test_explained_sizes_are_those_of_the_package() -> None:
    report = trainload.explain_shapes(recurrent())
    assert [(dim.dim, dim.example) for dim in report.dims if dim.input == "state"] == [
        (0, 4),
        (1, 2),
        (2, 5),
    ]


@given(
    place=st.integers(0, 3),
    named=st.sampled_from(["batch", "rows"]),
    shared=st.sets(st.sampled_from(["b", "c.0", "c.1"])),
    data=st.data(),
)
def test_a_jobs_functions_are_given_the_batch_as_it_was(
    place: int, named: str, shared: set[str], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    shape = (*sizes[:place], 4, *sizes[place:])
    batch = {
        "a": torch.randn(4, 2),
        "b": torch.randn(3),
        "c": (torch.randn(shape), torch.tensor(2.0)),
    }
    said = {"a": {0: Dim(named)}} | (
        {} if "c.0" in shared else {"c.0": {place - data.draw(st.sampled_from([0, 4])): Dim(named)}}
    )
    found = arranged(job(nn.Linear(2, 2), batch=batch, dynamic=said, shared=sorted(shared)))
    leaves = leaves_of(found.batch)
    assert set(leaves) == {"a", "b", "c.0", "c.1"} - shared
    assert "c.0" in shared or leaves["c.0"].shape == (4, *sizes)
    torch.testing.assert_close(rebuild(found.batch, leaves), batch, rtol=0, atol=0)
    assert arranged(found) is found


def test_a_write_to_a_shared_input_is_refused_at_its_line() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        batch["loss"]["weight"].mul_(2)
        return weighted(model, batch)

    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(
        CaptureError, match=rf'test_rows\.py", line {line}, in .*an input that all rows share'
    ):
        capture(replace(recurrent(), loss=loss))


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        (
            {"shared": ["loss.weight"]},
            "Job.batch: loss.scale",
            r"no batch dim .*shared=\['loss\.scale'\]",
        ),
        (
            {"shared": ["loss.scale"]},
            "Job.batch",
            r"the same leading size.* Declare shared=\['loss\.weight'\] if it is the same",
        ),
        (
            {"dynamic": {}},
            "Job.batch",
            (
                r"Declare dynamic=\{'state': \{1: Dim\('batch'\)\}\} if its rows are dim 1, or"
                r" shared=\['state'\]"
            ),
        ),
        ({"shared": ["loss", "los"]}, "Job.shared", r"not in the batch .*got 'los'"),
        ({"shared": "loss"}, "Job.shared", "a single name instead of a list of names"),
        ({"shared": ["loss", "state"]}, "Job.dynamic['state']", "fixed to those of the example"),
        (
            {"shared": ["loss", "x", "y", "state"], "dynamic": {}},
            "Job.shared",
            "none has a batch dim",
        ),
    ],
)
def test_what_is_not_declared_or_wrongly_is_told_with_what_to_write(
    options: dict[str, Any], where: str, message: str
) -> None:
    with pytest.raises(JobError, match=message) as caught:
        capture(recurrent(**options))
    assert caught.value.where == where
