"""The number of rows on which graphs are compared depends on the free memory."""

from __future__ import annotations

import pytest
import torch

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import StepGraph
from trainload.launching.verification.row_limit import fitting_rows, rows_within
from trainload.packaging.package import Package
from trainload.sharding.analysis.liveness import held
from trainload.sharding.planner.plan_costs import sizes_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def step(tiny: Package) -> StepGraph:
    return derive(tiny.program(), "train", CPU)


def peak(step: StepGraph, rows: int) -> int:
    return held(step.module, sizes_of(step.module, step.inputs, rows)).peak


def test_all_rows_are_taken_where_they_fit(step: StepGraph) -> None:
    assert rows_within(step.module, step.inputs, 64, peak(step, 64)) == 64


def test_rows_are_halved_until_they_fit(step: StepGraph) -> None:
    assert rows_within(step.module, step.inputs, 64, peak(step, 64) - 1) == 32
    assert rows_within(step.module, step.inputs, 64, peak(step, 20)) == 16


def test_one_row_is_always_taken(step: StepGraph) -> None:
    assert rows_within(step.module, step.inputs, 64, 0) == 1


def test_a_cpus_memory_is_not_looked_at(step: StepGraph) -> None:
    assert fitting_rows(step.module, step.inputs, 2**40, CPU) == 2**40
