"""Batches generated from what a package stores of its example."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor
from torch.export import Dim

from trainload.capture.job.definition import Job
from trainload.capture.job.synthesise import (
    QUANTILES,
    quantiles_of,
    rows_of,
    synthesise,
    with_quantiles,
)
from trainload.capture.program import GraphCapture, InputSpec, Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import DataError


def known(made: Job) -> Program:
    program = capture(made)
    return with_quantiles(program, dict.fromkeys(program.graphs, made.batch))


@pytest.fixture(scope="module")
def train() -> GraphCapture:
    made = job(Model())
    return known(made).graphs["train"]


def given(train: GraphCapture, values: Tensor, dtype: str) -> GraphCapture:
    """Return the graph, with an input declared as if the example had held `values`."""
    return dataclasses.replace(
        train, inputs=(InputSpec("x", dtype, train.inputs[0].shape, quantiles_of(values)),)
    )


def test_quantiles_are_entries_from_the_smallest_to_the_greatest() -> None:
    values = torch.tensor([5, -100, 3, 3, 9, 40])
    found = quantiles_of(values)
    assert len(found) == QUANTILES
    assert (found[0], found[-1]) == (-100, 40)
    assert list(found) == sorted(found)
    assert set(found) <= set(values.tolist())


def test_what_is_not_finite_is_no_quantile() -> None:
    assert set(quantiles_of(torch.tensor([float("nan"), float("inf"), 1.5, -float("inf")]))) == {
        1.5
    }


def test_truth_values_count_as_numbers() -> None:
    found = quantiles_of(torch.tensor([True, False]))
    assert {(type(value), value) for value in found} == {(int, 0), (int, 1)}


@pytest.mark.parametrize(
    "values", [torch.zeros(0), torch.zeros(3, dtype=torch.complex64), torch.tensor([float("nan")])]
)
def test_what_holds_no_real_number_has_no_quantiles(values: Tensor) -> None:
    assert quantiles_of(values) == ()


def test_a_batch_has_the_examples_sizes(train: GraphCapture) -> None:
    assert synthesise(train, 0)["x"].shape == (4, 8)


def test_a_batch_may_have_more_rows(train: GraphCapture) -> None:
    assert synthesise(train, 0, 1)["x"].shape == (5, 8)
    assert rows_of(train, 1) == 5


def test_rows_that_are_fixed_stay() -> None:
    made = job(Model(), dynamic={"x": {0: Dim.STATIC}})
    assert synthesise(known(made).graphs["train"], 0, 1)["x"].shape == (4, 8)


def test_rows_beyond_the_range_are_taken_away_instead() -> None:
    made = job(Model(), dynamic={"x": {0: Dim("batch", min=1, max=4)}})
    assert synthesise(known(made).graphs["train"], 0, 1)["x"].shape == (3, 8)


def test_one_seed_gives_one_batch(train: GraphCapture) -> None:
    assert torch.equal(synthesise(train, 3)["x"], synthesise(train, 3)["x"])
    assert not torch.equal(synthesise(train, 3)["x"], synthesise(train, 4)["x"])


def test_integers_are_the_examples_own(train: GraphCapture) -> None:
    values = torch.tensor([-100, 0, 7, 30])
    made = synthesise(given(train, values, "int64"), 0)["x"]
    assert made.dtype == torch.int64
    assert set(made.flatten().tolist()) == set(values.tolist())


def test_numbers_lie_between_the_examples(train: GraphCapture) -> None:
    made = synthesise(given(train, torch.tensor([0.25, 0.75]), "float32"), 0)["x"]
    assert 0.25 <= float(made.min()) < float(made.max()) <= 0.75
    assert len(set(made.flatten().tolist())) > 2


def test_a_mask_of_zeros_and_ones_stays_one(train: GraphCapture) -> None:
    made = synthesise(given(train, torch.tensor([0.0, 1.0]), "float32"), 0)["x"]
    assert set(made.flatten().tolist()) == {0.0, 1.0}


def test_integers_of_an_unknown_range_are_refused(train: GraphCapture) -> None:
    with pytest.raises(DataError, match="input x: the package does not record the range of values"):
        synthesise(given(train, torch.zeros(0), "int64"), 0)
