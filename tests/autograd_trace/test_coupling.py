"""A freeze records whether the results of a row depend on other rows of the call.

A plan that divides the batch reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.plans.coupled_rows import note_on_coupled_rows

ROWS = 6


class Net(nn.Module):
    """Model of tokens (rows, 5) and values (rows, 4); returns (rows, 3)."""

    def __init__(self, **of_embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(4, 4, **of_embedding)
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, values: Tensor, *, normalised: bool) -> Tensor:
        hidden = self.words(tokens).mean(1) + values
        logits: Tensor = self.head(self.drop(self.norm(hidden) if normalised else hidden))
        return logits


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"], batch["values"], normalised=False)
    return functional.cross_entropy(logits, batch["label"])


def weighed(model: nn.Module, batch: dict[str, Tensor]) -> trainload.Loss:
    """Return a mean over positions, where rows have different numbers of them."""
    kept = (batch["tokens"] > 0).sum(1).float()
    losses = functional.cross_entropy(
        model(batch["tokens"], batch["values"], normalised=False), batch["label"], reduction="none"
    )
    return trainload.Loss((losses * kept).sum() / kept.sum(), weight=kept.sum())


def in_16_bits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["tokens"], batch["values"], normalised=False)
    return functional.cross_entropy(logits.float(), batch["label"])


def normalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(
        model(batch["tokens"], batch["values"], normalised=True), batch["label"]
    )


def contrasted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that contrasts each row with the others of its batch."""
    found = functional.normalize(model(batch["tokens"], batch["values"], normalised=False))
    return functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def spread(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(batch["tokens"], batch["values"], normalised=False)
    return plain(model, batch) + logits.std()


def job(loss: Callable[..., Any], **of_embedding: Any) -> trainload.Job:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "tokens": torch.randint(4, (ROWS, 5), generator=generator),
        "values": torch.randn(ROWS, 4, generator=generator),
        "label": torch.randint(3, (ROWS,), generator=generator),
    }

    def sgd(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(
            [p for n, p in model.named_parameters() if loss is normalised or "norm" not in n],
            lr=0.1,
        )

    return trainload.Job(Net(**of_embedding), batch, sgd, loss=loss, steps=2, global_batch=4)


def frozen(folder: Path, loss: Callable[..., Any], **of_embedding: Any) -> Package:
    return trainload.freeze(job(loss, **of_embedding), folder / "job.tl")


@pytest.mark.matrix("weighed")
@pytest.mark.parametrize("loss", [plain, weighed, in_16_bits])
@pytest.mark.filterwarnings(
    "ignore:.*parameters.* in no optimizer", "ignore:.*parameters get no gradient"
)
def test_rows_by_themselves_are_not_coupled(tmp_path: Path, loss: Callable[..., Any]) -> None:
    assert not frozen(tmp_path, loss).manifest.graphs["train"].coupled


COUPLED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "batch norm": (normalised, {}),
    "gradients by frequency": (plain, {"scale_grad_by_freq": True}),
    "negatives within the batch": (contrasted, {}),
    "a statistic of the batch": (spread, {}),
}


@pytest.mark.matrix("gradients by frequency")
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.filterwarnings(
    "ignore:.*parameters.* in no optimizer", "ignore:.*parameters get no gradient"
)
def test_rows_that_depend_on_one_another_are_noted(tmp_path: Path, name: str) -> None:
    loss, options = COUPLED[name]
    assert frozen(tmp_path, loss, **options).manifest.graphs["train"].coupled


class Small(nn.Module):
    """A layer, and what losses combine it with: a batch norm, or a count of calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def counted(model: Any, batch: dict[str, Tensor]) -> Tensor:
    model.calls += 1
    return functional.cross_entropy(model(batch["x"]) / model.calls, batch["y"])


def masked(model: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


ZEROS, ONES, LABELS = (
    torch.zeros(ROWS, 4),
    torch.ones(ROWS, dtype=torch.int64),
    torch.arange(ROWS) % 3,
)
VALUES = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2))
UNSEEN: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "a batch norm over zeros": (
        lambda m, b: functional.cross_entropy(m.norm(m(b["x"])), b["y"]),
        {"x": ZEROS, "y": LABELS},
    ),
    "weights of classes": (
        lambda m, b: functional.cross_entropy(
            m(b["x"]), b["y"], weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=7
        ),
        {"x": VALUES, "y": ONES},
    ),
    "a mask of ones": (masked, {"x": VALUES, "y": LABELS, "mask": ONES}),
    "a count of calls": (counted, {"x": VALUES, "y": LABELS}),
    "a mean of ones": (
        lambda m, b: m(b["x"] - b["x"].mean(0)).square().mean(),
        {"x": torch.ones(ROWS, 4)},
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_rows_that_depend_on_one_another_are_noted_where_the_example_does_not_show_it(
    name: str, tmp_path: Path
) -> None:
    loss, batch = UNSEEN[name]
    given = trainload.Job(
        Small(), batch, lambda m: optim.SGD(m.parameters(), lr=0.1), loss=loss, steps=2
    )
    assert trainload.freeze(given, tmp_path / "job.tl").manifest.graphs["train"].coupled


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen(tmp_path_factory.mktemp("normalised"), normalised)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": "single"}, None),
        ({"strategy": "single", "accumulate": 2}, "2 of 4"),
        ({"strategy": "zero0"}, "2 of 4"),
        ({"strategy": "zero0", "batch_norm": "synchronised"}, None),
        ({"strategy": "zero0", "batch_norm": "synchronised", "accumulate": 2}, "1 of 4"),
    ],
)
def test_a_plan_says_where_losses_depend_on_the_rows_of_a_call(
    package: Package, options: dict[str, Any], told: str | None
) -> None:
    plan = trainload.plan(
        package,
        trainload.Cluster(devices_per_node=1 if options["strategy"] == "single" else 2),
        **options,
    )
    note = note_on_coupled_rows(package.manifest, plan)
    assert note is None if told is None else note is not None and f"here {told}" in note


def test_the_journal_says_so(package: Package, tmp_path: Path) -> None:
    batch = job(normalised).batch
    table: dict[str, Any] = {name: np.concatenate([value, value]) for name, value in batch.items()}
    np.savez(tmp_path / "rows.npz", **table)
    plan = trainload.plan(package, trainload.Cluster(), "single", accumulate=2)
    trainload.launch(
        package,
        plan,
        tmp_path / "rows.npz",
        run_dir=tmp_path / "run",
        backend="local",
        compile=False,
    )
    (warning,) = [
        event.data["message"] for event in read_events(tmp_path / "run") if event.kind == "warning"
    ]
    assert warning.startswith("rows of one call depend on each other in graph train")
