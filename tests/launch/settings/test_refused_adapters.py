"""Adapters that do not fit a package or plan are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.goldens import goldens
from tests.launch.optimizer_jobs import Model, adam, make_job
from tests.launch.settings.adapters_by_hand import ADAPTERS
from torch import Tensor, nn

import trainload
from trainload.core.errors import JobError, PackageError, PlanError
from trainload.launching.settings.adapters import Adapters
from trainload.packaging.package import Package


class Strange(Model):
    """Model that uses the weights of its layers in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.unused = nn.Linear(8, 8)
        self.still = nn.Linear(8, 8)
        self.tied = nn.Linear(12, 8, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.still(x)
        penalty = self.second.weight.square().mean()
        out: Tensor = super().forward(x + self.table.weight.sum(0)) + penalty + still.detach()
        return out


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Package:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return adam(
            nn.ParameterList(
                p
                for name, p in model.named_parameters()
                if not name.startswith(("unused", "still"))
            )
        )

    with pytest.warns(UserWarning, match="4 parameters get no gradient"):
        return trainload.freeze(
            make_job(optimizer, Strange), tmp_path_factory.mktemp("strange") / "job.tl"
        )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"layers": ("secnd.weight",)},
            r"no parameter matches 'secnd.weight' \(expected second.weight",
        ),
        (
            {"layers": ("first.*",)},
            r"first.bias is not the weight of a linear layer .*got shape \(12,\)",
        ),
        (
            {"layers": ("table.weight",)},
            r"not only used as the weight of a linear layer .*got aten.sum.dim_IntList at File",
        ),
        (
            {"layers": ("second.weight",)},
            (
                r"not only used as the weight of a linear layer .*got aten.square.default at File"
                r" .*line \d+, in forward"
            ),
        ),
        ({"layers": ("last.weight",)}, "last.weight and tied.weight are the same parameter"),
        ({"layers": ("unused.weight",)}, "no training graph uses unused.weight"),
        ({"layers": ("still.weight",)}, "still.lora_A.weight gets no gradient from graph train"),
        (
            {"layers": ("third.weight",), "rank": 13},
            (
                r"adapters.rank: the rank is greater than that of a layer \(expected at most 12,"
                r" .*got 13\)"
            ),
        ),
        (
            {"layers": ("third.weight",), "also": ("nrm.weight",)},
            r"no trained parameter matches 'nrm.weight' \(expected norm.weight",
        ),
        (
            {"layers": ("third.weight",), "also": ("third.*",)},
            "is selected for an adapter and for training",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    strange: Package, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(JobError, match=line):
        trainload.Overrides(adapters=Adapters(**{"rank": 2, **options})).apply(strange)


def test_a_graph_that_would_train_nothing_is_refused() -> None:
    golden = next(each for each in goldens() if each.name == "turns")
    overrides = trainload.Overrides(adapters=Adapters(rank=1, layers=("judge.0.weight",)))
    with pytest.raises(JobError, match="graph generator would have no trained parameters"):
        overrides.apply(trainload.open(golden.package))


def test_a_plan_for_the_frozen_package_is_refused(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with pytest.raises(
        PlanError, match="for the unmodified package, but this run changes the package's graphs"
    ):
        trainload.launch(
            package,
            plan,
            rows,
            run_dir=tmp_path / "run",
            backend="local",
            overrides=trainload.Overrides(adapters=ADAPTERS),
        )


def test_an_abstract_package_has_values_of_its_adapters_alone() -> None:
    abstract = next(each for each in goldens() if each.name == "shapes")
    overrides = trainload.Overrides(adapters=trainload.Adapters(rank=1, layers=("0.weight",)))
    adapted = overrides.apply(trainload.open(abstract.package))
    assert adapted.manifest.abstract is not None
    new = {entry.name for entry in adapted.manifest.parameters if entry.trainable}
    assert set(adapted.manifest.abstract.added) == new
    assert len(new) == 2
    with pytest.raises(PackageError, match="this package is abstract"):
        _ = adapted.weights
