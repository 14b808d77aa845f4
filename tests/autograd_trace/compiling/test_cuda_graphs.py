"""Calls that are recorded as CUDA graphs, on a machine without a GPU.

Here a recording repeats its operators on the same tensors, as a CUDA graph repeats kernels at the
same addresses. `make gpu-compile` makes real recordings for a described GPU, and `make gpu` on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from trainload.autograd_trace.compiling.cuda_graphs import MOST_SHAPES, Pool, Recorded
from trainload.core.errors import CompileError


class Repeated:
    """Stands for `torch.cuda.CUDAGraph`."""

    current: Repeated | None = None

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


@contextmanager
def recording(graph: Repeated, **_: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    Repeated.current = graph
    try:
        yield
    finally:
        Repeated.current = None


class Sums:
    """Adds two tensors, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        self.calls += 1
        result = x + y
        if Repeated.current is not None:
            Repeated.current.steps.append(lambda: torch.add(x, y, out=result))
        return [result]


@pytest.fixture(autouse=True)
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeated)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


def recorded(call: Any, *, is_read_at_once: bool = False) -> Recorded:
    return Recorded("train.only", call, [is_read_at_once], Pool())


def of(number: float, size: int = 3) -> Tensor:
    return torch.full((size,), number)


def numbers(results: Sequence[Tensor]) -> list[float]:
    (result,) = results
    return result.tolist()


def test_the_third_call_is_recorded_and_later_ones_are_replayed() -> None:
    sums = Sums()
    call = recorded(sums)
    for _ in range(6):
        call(of(1), of(2))
    assert sums.calls == 3


def test_a_replay_reads_the_values_that_it_is_given() -> None:
    call = recorded(Sums())
    found = [numbers(call(of(number), of(10))) for number in range(6)]
    assert found == [[number + 10] * 3 for number in range(6)]


def test_a_value_that_changes_in_place_is_read_where_it_is() -> None:
    call, weight = recorded(Sums()), of(0)
    found = []
    for number in range(6):
        weight.fill_(number)
        found.append(numbers(call(weight, of(10))))
    assert found == [[number + 10] * 3 for number in range(6)]


def test_results_outlive_the_next_call() -> None:
    call = recorded(Sums())
    results = [call(of(number), of(0)) for number in range(6)]
    assert [numbers(result) for result in results] == [[number] * 3 for number in range(6)]


def test_results_that_are_read_at_once_are_not_copied() -> None:
    call = recorded(Sums(), is_read_at_once=True)
    results = [call(of(number), of(0))[0] for number in range(6)]
    assert len({result.data_ptr() for result in results[2:]}) == 1


def test_every_shape_has_a_recording() -> None:
    sums = Sums()
    call = recorded(sums)
    for _ in range(5):
        assert numbers(call(of(1), of(2))) == [3.0] * 3
        assert numbers(call(of(1, 4), of(2, 4))) == [3.0] * 4
    assert sums.calls == 2 * 3


def test_after_some_shapes_no_more_are_recorded() -> None:
    sums = Sums()
    call = recorded(sums)
    for size in range(1, MOST_SHAPES + 1):
        for _ in range(3):
            call(of(1, size), of(2, size))
    before = sums.calls
    for _ in range(5):
        assert numbers(call(of(1, 100), of(2, 100))) == [3.0] * 100
    assert sums.calls == before + 5


def test_an_operator_that_cannot_be_recorded_is_named() -> None:
    def call(x: Tensor) -> list[Tensor]:
        if Repeated.current is not None:
            torch.sin(x)
            raise RuntimeError("operation not permitted when stream is capturing")
        return [x]

    failing = Recorded("train.only", call, [True], Pool())
    failing(of(1))
    failing(of(1))
    with pytest.raises(
        CompileError,
        match=r"train.only: aten.sin.default cannot be part of a CUDA graph .*not permitted",
    ):
        failing(of(1))


def test_memory_that_is_lacking_is_no_fault_of_an_operator() -> None:
    def call(x: Tensor) -> list[Tensor]:
        if Repeated.current is not None:
            raise torch.OutOfMemoryError
        return [x]

    failing = Recorded("train.only", call, [True], Pool())
    failing(of(1))
    failing(of(1))
    with pytest.raises(torch.OutOfMemoryError):
        failing(of(1))
