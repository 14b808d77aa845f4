"""A rank that is alone computes as if all ranks had its data, and notices what waits too late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trainload.autograd_trace.derivation.named_groups import alone_of, bind_groups, unbind_groups

OPS: Any = torch.ops._c10d_functional
GROUP = "data"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Make this process rank 1 of 2 in one of two groups."""
    groups = {GROUP: [[0, 1], [2, 3]]}
    with alone_of(1, 4):
        bind_groups(groups)
        yield
        unbind_groups(groups)


def ended(result: Tensor) -> list[float]:
    values: list[float] = OPS.wait_tensor(result).tolist()
    return values


@pytest.fixture
def x() -> Tensor:
    return torch.arange(4.0)


def test_a_gather_repeats_this_ranks_part(x: Tensor) -> None:
    assert ended(OPS.all_gather_into_tensor(x, 2, GROUP)) == [0.0, 1.0, 2.0, 3.0] * 2


def test_a_sum_is_this_ranks_value_times_the_ranks(x: Tensor) -> None:
    assert ended(OPS.all_reduce(x, "sum", GROUP)) == [0.0, 2.0, 4.0, 6.0]


def test_a_maximum_is_this_ranks_value(x: Tensor) -> None:
    assert ended(OPS.all_reduce(x, "max", GROUP)) == [0.0, 1.0, 2.0, 3.0]


def test_a_scattered_sum_is_this_ranks_part(x: Tensor) -> None:
    assert ended(OPS.reduce_scatter_tensor(x, "sum", 2, GROUP)) == [4.0, 6.0]


def test_a_broadcast_leaves_the_value(x: Tensor) -> None:
    assert ended(OPS.broadcast(x, 0, GROUP)) == [0.0, 1.0, 2.0, 3.0]


def test_a_result_that_was_not_waited_for_is_undefined(x: Tensor) -> None:
    result = OPS.all_gather_into_tensor(x, 2, GROUP)
    assert all(math.isnan(value) for value in result.tolist())
    OPS.wait_tensor(result)


def test_an_operand_that_is_overwritten_before_the_wait_changes_the_result(x: Tensor) -> None:
    result = OPS.reduce_scatter_tensor(x, "sum", 2, GROUP)
    x.zero_()
    assert ended(result) == [0.0, 0.0]
