"""The rows that a rank reads, and their prefetching, in order and with errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trainload.autograd_trace.graphs import Recipe, TurnRecipe
from trainload.capture.program import InputSpec
from trainload.launching.data.batch_order import BatchOrder
from trainload.launching.data.dataset import open_dataset
from trainload.launching.data.prefetch import BatchStream, CallRows, RankRows
from trainload.launching.data.run_data import OpenPart, RunData
from trainload.launching.data.sampler import rows
from trainload.sharding.plans.plan import NO_ESTIMATE, Cluster, Plan


def plan(world: int, accumulate: int, global_batch: int = 24) -> Plan:
    return Plan(
        package="0" * 64,
        cluster=Cluster(devices_per_node=world),
        strategy="single" if world == 1 else "zero0",
        global_batch=global_batch,
        accumulate=accumulate,
        buckets=(),
        estimate=NO_ESTIMATE,
    )


def recipe(seed: int, *turns: TurnRecipe) -> Recipe:
    return Recipe(optimizer="SGD", groups=(), steps=1, global_batch=24, seed=seed, loop=turns)


@pytest.fixture
def dataset(tmp_path: Path) -> RunData:
    np.savez(tmp_path / "a.npz", x=np.arange(50, dtype=np.int64))
    found = open_dataset(
        tmp_path / "a.npz", [InputSpec("x", "int64", ("batch",))], tmp_path / "cache"
    )
    return RunData((OpenPart(found, {}, ""),), (1.0,))


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (1, 4), (3, 2), (4, 3), (24, 1)])
def test_the_global_batch_does_not_depend_on_who_reads_it(world: int, accumulate: int) -> None:
    cut = plan(world, accumulate)
    calls = [
        call
        for rank in range(world)
        for call in RankRows(recipe(5), BatchOrder(5, (50,)), cut, rank)(7)
    ]
    found = np.concatenate([call.rows for call in sorted(calls, key=lambda call: call.first_row)])
    assert np.array_equal(found, rows(5, 50, 7 * 24, 24))


def test_microbatch_m_of_rank_r_is_chunk_m_times_world_plus_r() -> None:
    calls = RankRows(recipe(5), BatchOrder(5, (50,)), plan(3, 2), 1)(0)
    assert [(call.microstep, call.first_row, len(call.rows)) for call in calls] == [
        (0, 4, 4),
        (1, 16, 4),
    ]


def test_batches_come_in_order_with_their_rows(dataset: RunData) -> None:
    which = RankRows(recipe(1), BatchOrder(1, (50,)), plan(2, 2), 0)
    with BatchStream(dataset, which, 3, 8) as stream:
        found = [
            (call.step, call.microstep, call.first_row, call.batch["x"].tolist()) for call in stream
        ]
    wanted = [
        (c.step, c.microstep, c.first_row, c.rows.tolist())
        for step in range(3, 8)
        for c in which(step)
    ]
    assert found == wanted


def test_a_stream_begun_later_gives_the_rest(dataset: RunData) -> None:
    which = RankRows(recipe(1), BatchOrder(1, (50,)), plan(1, 1), 0)
    with BatchStream(dataset, which, 0, 6) as first, BatchStream(dataset, which, 4, 6) as second:
        assert [c.batch["x"].tolist() for c in first][4:] == [c.batch["x"].tolist() for c in second]


def test_it_reads_two_ahead_and_no_more(dataset: RunData) -> None:
    asked: list[int] = []

    def which(step: int) -> Iterator[CallRows]:
        asked.append(step)
        yield CallRows(step, 0, 0, 0, np.array([step]))

    with BatchStream(dataset, which, 0, 40) as stream:
        next(stream)
        deadline = time.monotonic() + 30
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert asked == [0, 1, 2, 3]  # one taken, two ready, one waiting for room


def test_an_error_in_the_thread_is_raised_in_its_turn(dataset: RunData) -> None:
    def which(step: int) -> Iterator[CallRows]:
        yield CallRows(step, 0, 0, 0, np.array([step if step < 2 else 99]))

    with BatchStream(dataset, which, 0, 5) as stream:
        assert [next(stream).batch["x"].item(), next(stream).batch["x"].item()] == [0, 1]
        for _ in range(2):  # the error is raised again
            with pytest.raises(IndexError, match="99"):
                next(stream)


def test_closing_joins_the_thread(dataset: RunData) -> None:
    before = set(threading.enumerate())
    stream = BatchStream(
        dataset, RankRows(recipe(1), BatchOrder(1, (50,)), plan(1, 1), 0), 0, 10**6
    )
    next(stream)
    stream.close()
    stream.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StopIteration):
        next(stream)
