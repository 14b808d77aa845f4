"""A value of the data that is no valid index.

The error names the step, the input, the row, the value, the valid range and the user's line.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.laws.runs import Run, ranks
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload.core.errors import DataError, TrainingError
from trainload.launching.data.sampler import rows
from trainload.launching.run.journal import LOGS, log_name, read_events
from trainload.launching.worker.rank_state import RankState
from trainload.packaging.package import Package

WORDS, CLASSES, LENGTH = 12, 5, 4
ROWS, STEPS, SEED = 8, 3, 3
STEP = 1
"""Step that reads the bad row (0-based)."""
BAD = int(rows(SEED, ROWS * STEPS, STEP * ROWS, ROWS)[5])
"""The bad row, in the second half of the step's batch."""


class Classifier(nn.Module):
    """Model; tokens (rows, LENGTH) -> logits (rows, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("order", torch.arange(CLASSES).flip(0))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(tokens).mean(1))
        return logits


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]), batch["label"])


def counted_from_one(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]), batch["label"] - 1)


def gathered(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(batch["tokens"])
    return -logits.log_softmax(1).gather(1, batch["label"].unsqueeze(1)).mean()


def looked_up(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]), model.order[batch["label"]])


def one_hot(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(
        model(batch["tokens"]), functional.one_hot(batch["label"], CLASSES).float()
    )


def of_each_token(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model.head(model.words(batch["tokens"]))
    return functional.cross_entropy(logits.flatten(0, 1), batch["label"].repeat_interleave(LENGTH))


def frozen(loss: Callable[..., Tensor], folder: Path) -> Package:
    torch.manual_seed(0)
    model = Classifier()
    batch = {"tokens": torch.randint(WORDS, (4, LENGTH)), "label": torch.randint(1, CLASSES, (4,))}

    def sgd(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=0.1)

    return trainload.freeze(
        trainload.Job(
            model=model,
            batch=batch,
            loss=loss,
            optimizer=sgd,
            steps=STEPS,
            global_batch=ROWS,
            seed=SEED,
        ),
        folder / "job.tl",
    )


def written(folder: Path, column: str, value: int) -> Path:
    """Write rows, of which the bad one has `value` at the last position of a column."""
    generator = np.random.default_rng(0)
    table: dict[str, Any] = {
        "tokens": generator.integers(0, WORDS, (ROWS * STEPS, LENGTH)),
        "label": generator.integers(1, CLASSES, ROWS * STEPS),
    }
    table[column].reshape(ROWS * STEPS, -1)[BAD, -1] = value
    np.savez(folder / "rows.npz", **table)
    return folder / "rows.npz"


def launch(package: Package, data: Path, folder: Path, **options: Any) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single", accumulate=2)
    trainload.launch(package, plan, data, run_dir=folder / "run", backend="local", **options)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen(plain, tmp_path_factory.mktemp("classifier"))


BAD_VALUES = [
    ("tokens", -1, WORDS),
    ("tokens", WORDS, WORDS),
    ("tokens", 2**40, WORDS),
    ("label", -1, CLASSES),
    ("label", CLASSES, CLASSES),
]


def demand_told(error: DataError, column: str, value: int, greatest: int, line: str) -> None:
    """Check that the error contains everything that a user needs to find the row."""
    assert error.where.startswith(f"step {STEP + 1}, row {BAD} of ")
    assert f"the value {value} of input '{column}' is out of range" in error.problem
    assert (error.expected, error.got) == (f"0 to {greatest}", str(value))
    assert re.search(r"test_bad_rows\.py:\d+", error.problem) and line in error.problem


@pytest.mark.matrix("interpreted-tokens--1-*", "interpreted-label-5-*")
@pytest.mark.parametrize(("column", "value", "size"), BAD_VALUES)
@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_a_value_out_of_range_is_told_with_its_row(
    package: Package, tmp_path: Path, column: str, value: int, size: int, compiled: bool
) -> None:
    with pytest.raises(DataError) as caught:
        launch(package, written(tmp_path, column, value), tmp_path, compile=compiled)
    demand_told(
        caught.value,
        column,
        value,
        size - 1,
        "self.words(tokens)" if column == "tokens" else "cross_entropy(",
    )


def test_an_assertion_is_told_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"row {BAD} of .*one_hot: Class values must be smaller .*\(got label 7\)"
    ):
        launch(frozen(one_hot, tmp_path), written(tmp_path, "label", 7), tmp_path, compile=False)


@pytest.mark.matrix("looked_up")
@pytest.mark.parametrize("loss", [gathered, looked_up, of_each_token])
def test_operators_of_other_kinds_tell_the_same(
    tmp_path: Path, loss: Callable[..., Tensor]
) -> None:
    with pytest.raises(
        DataError, match=rf"row {BAD} of .*the value 7 of input 'label' is out of range"
    ):
        launch(frozen(loss, tmp_path), written(tmp_path, "label", 7), tmp_path, compile=False)


def test_an_index_that_is_computed_names_what_it_is_computed_from(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"row {BAD} of .*the index -1, computed from 'label', is out of range"
    ):
        launch(
            frozen(counted_from_one, tmp_path),
            written(tmp_path, "label", 0),
            tmp_path,
            compile=False,
        )


def test_a_label_that_the_loss_ignores_is_fine(package: Package, tmp_path: Path) -> None:
    launch(package, written(tmp_path, "label", -100), tmp_path, compile=False)


def test_evaluation_tells_the_row_too(package: Package, tmp_path: Path) -> None:
    data = written(tmp_path, "tokens", WORDS)
    with pytest.raises(
        DataError,
        match=rf"the evaluation after step 0, row {BAD} of .*the value {WORDS} of input 'tokens'",
    ):
        trainload.evaluate(
            package,
            trainload.plan(package, trainload.Cluster(), "single"),
            data,
            backend="local",
            compile=False,
        )


def test_the_rank_that_has_the_row_tells_it(package: Package, tmp_path: Path) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    with ranks(
        2, [Run(tmp_path / "run", package, plan, written(tmp_path, "tokens", WORDS))], tmp_path
    ) as started:
        for process in started:
            process.join(300)
        assert [process.exitcode for process in started] == [1, 1]
    told = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [f"row {BAD} of" in text for text in told] == [False, True]


@pytest.mark.slow
def test_a_run_on_ray_is_not_tried_again(
    package: Package, tmp_path: Path, ray_cluster: None
) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    data = written(tmp_path, "tokens", WORDS)
    with pytest.raises(DataError) as caught:
        trainload.launch(package, plan, data, run_dir=tmp_path / "run", compile=False)
    demand_told(caught.value, "tokens", WORDS, WORDS - 1, "self.words(tokens)")
    assert [event.kind for event in read_events(tmp_path / "run")].count("start") == 1
    assert (
        "Traceback (most recent call last)" in (tmp_path / "run" / LOGS / log_name(1)).read_text()
    )


def inverted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Invert a matrix that depends on the parameters, without which the row cannot be found."""
    logits = model(batch["tokens"])
    inverse: Tensor = torch.linalg.inv(
        torch.diag_embed(logits * (batch["label"] != 0).unsqueeze(1))
    )
    return inverse.square().mean()


def test_another_failure_says_at_which_step_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=f"step {STEP + 1}: RuntimeError: linalg.inv: a matrix is singular"
    ):
        launch(frozen(inverted, tmp_path), written(tmp_path, "label", 0), tmp_path, compile=False)
    assert (
        "RuntimeError: linalg.inv: a matrix is singular"
        in (tmp_path / "run" / LOGS / log_name(0)).read_text()
    )


def test_an_error_of_the_machine_is_not_said_to_come_again(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(held: RankState) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RankState, "load_package", load)
    with pytest.raises(OSError, match="Input/output error"):
        launch(package, written(tmp_path, "label", 0), tmp_path, compile=False)


def test_an_error_of_making_the_graphs_is_told_as_one(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built_for(*_: object) -> None:
        raise ValueError("Cannot view a tensor")

    monkeypatch.setattr("trainload.launching.worker.preparation.built_for", built_for)
    with pytest.raises(
        TrainingError,
        match=(
            r"building the graphs: .*Cannot view a tensor.*The run is not retried, since it would"
            r" fail again"
        ),
    ):
        launch(package, written(tmp_path, "label", 1), tmp_path)
