"""Arguments and attributes are validated against their annotations.

An error names the one that is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.jobs import Model, mean_square
from tests.capture.jobs import job as job_of
from tests.trained import assert_trains_as_eager
from torch import nn

import trainload
from trainload import Cluster, Graph, Job, JobError, PlanError, RequestError, StorageError, Turn
from trainload.capture.job.definition import check_job
from trainload.capture.tracing.trace import capture
from trainload.packaging.package import Package
from trainload.sharding.planner.make_plan import make_plan


def job(**changed: Any) -> Job:
    return replace(job_of(Model()), **changed)


class Nothing:
    """A type that no annotation allows."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job(), tmp_path_factory.mktemp("package") / "job.tl")


@pytest.mark.parametrize("name", [field.name for field in fields(Job)])
def test_an_attribute_of_a_job_of_the_wrong_type_is_named(name: str) -> None:
    with pytest.raises(JobError, match=rf"Job\.{name}: has the wrong type"):
        check_job(job(**{name: Nothing()}))


@pytest.mark.parametrize("name", [field.name for field in fields(Graph)])
def test_an_attribute_of_a_graph_of_the_wrong_type_is_named(name: str) -> None:
    graph = Graph(**{name: Nothing()})  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(JobError, match=rf"Job\.graphs\['a'\]\.{name}: has the wrong type"):
        check_job(job(graphs={"a": graph}))


@pytest.mark.parametrize("name", [field.name for field in fields(Turn)])
def test_an_attribute_of_a_turn_of_the_wrong_type_is_named(name: str) -> None:
    turn = Turn(**{"graph": "a", name: Nothing()})  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(JobError, match=rf"Job\.loop\[0\]\.{name}: has the wrong type"):
        check_job(job(loop=[turn]))


@pytest.mark.parametrize("verb", [trainload.freeze, trainload.open, make_plan])
def test_an_argument_of_the_wrong_type_is_named(
    verb: Callable[..., object], package: Package, tmp_path: Path
) -> None:
    right = {"job": job(), "path": tmp_path / "job.tl", "package": package, "cluster": Cluster()}
    for name in inspect.signature(verb).parameters:
        needed = {
            n: right[n]
            for n, p in inspect.signature(verb).parameters.items()
            if p.default is p.empty
        }
        with pytest.raises(RequestError, match=rf"^{name}: (has the wrong type|is out of range)"):
            verb(**(needed | {name: Nothing()}))


def test_a_wrong_value_within_a_container_is_named() -> None:
    with pytest.raises(
        JobError,
        match=(
            r"Job\.loop\.1: has the wrong type \(expected an instance of Turn or a valid string,"
            r" got 3\)"
        ),
    ):
        check_job(job(loop=["a", 3]))


def test_a_number_of_numpys_is_a_number() -> None:
    check_job(job(steps=np.int64(3), clip_norm=np.float32(1)))


@pytest.mark.parametrize("number", ["steps", "global_batch"])
def test_a_job_of_no_steps_or_rows_is_refused(number: str, tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=rf"Job\.{number}: is out of range \(expected greater than or equal to 1, got 0\)",
    ):
        trainload.freeze(job(**{number: 0}), tmp_path / "job.tl")


@pytest.mark.parametrize(
    "number",
    ["global_batch", "accumulate", "bucket_bytes", "shard_ranks", "tensor_ranks", "pipeline_ranks"],
)
def test_a_plan_of_none_is_refused(number: str, package: Package) -> None:
    with pytest.raises(
        PlanError,
        match=rf"{number}: is out of range \(expected greater than or equal to 1, got 0\)",
    ):
        trainload.plan(package, Cluster(), **{number: 0})  # type: ignore[arg-type]  # a name of any option


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"Cluster\.nodes: is out of range \(expected greater than or equal to 1, got 0\)",
    ):
        Cluster(nodes=0)


def test_a_class_in_place_of_a_factory_is_told_what_a_factory_is() -> None:
    with pytest.raises(
        JobError,
        match=(
            r"Job\.optimizer: a class .*expected lambda model: SGD\(model\.parameters\(\),"
            r" lr=0\.1\)"
        ),
    ):
        check_job(job(optimizer=torch.optim.SGD))


def test_what_an_optimizer_factory_raises_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=rf"{Path(__file__).name}:\d+: Job\.optimizer fails: ZeroDivisionError"
    ):
        trainload.freeze(
            job(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1 / 0)), tmp_path / "job.tl"
        )


@pytest.mark.parametrize("name", ["", 3, "a\nb"])
def test_a_metric_without_a_usable_name_is_refused(name: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> trainload.Loss:
        value = mean_square(model, batch)
        return trainload.Loss(value, metrics={name: value})

    with pytest.raises(JobError, match=r"Job\.loss: metrics: invalid name"):
        capture(job_of(Model(), loss=loss))


@pytest.mark.parametrize("name", ["loss", "weight"])
def test_a_metric_with_the_name_of_the_loss_or_its_weight_is_refused(name: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> trainload.Loss:
        value = mean_square(model, batch)
        return trainload.Loss(value, weight=torch.ones(()), metrics={name: value})

    with pytest.raises(JobError, match=f"Job.loss: metrics: a metric has the name of the {name}"):
        capture(job_of(Model(), loss=loss))


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_path_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the file name is too long or contains NUL"):
        trainload.freeze(job(), tmp_path / name)


@pytest.mark.parametrize("option", ["run_dir", "output", "checkpoints", "optimizer_from", "policy"])
def test_an_option_of_a_launch_that_is_no_path_is_named(
    option: str, package: Package, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run", option: 3}
    with pytest.raises(
        RequestError, match=rf"{option}: has the wrong type \(expected a path, got 3\)"
    ):
        trainload.launch(
            package,
            trainload.plan(package, Cluster()),
            tmp_path / "rows.npz",
            backend="local",
            **options,
        )


def distance(model: nn.Module, batch: dict[Any, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = (model(batch[0]) - batch["y"]).square().mean()
    return loss


def test_a_batch_with_integer_keys_trains_as_eager(tmp_path: Path) -> None:
    data: dict[Any, torch.Tensor] = {0: torch.randn(16, 8), "y": torch.randn(16, 1)}
    batch = {key: value[:4] for key, value in data.items()}
    assert_trains_as_eager(
        Job(nn.Linear(8, 1), batch, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), distance),
        data,
        tmp_path,
    )
