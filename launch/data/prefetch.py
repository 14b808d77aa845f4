"""The rows of each call of a rank, and a thread that prefetches them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from trainload.autograd_trace.graphs import Recipe
from trainload.autograd_trace.optimizer.rounds import draws_before, draws_of
from trainload.launching.data.batch_order import BatchOrder
from trainload.launching.data.run_data import RunData
from trainload.launching.data.sampler import Rows
from trainload.sharding.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class CallRows:
    """Rows of one call of a step graph.

    Attributes:
        step: number of the step.
        draw: number of the global batch within the step.
        microstep: number of the microbatch within the global batch.
        first_row: number of the first row within the global batch.
        rows: (n,) row numbers in the part.
        part: number of the part of the run's data.
    """

    step: int
    draw: int
    microstep: int
    first_row: int
    rows: Rows
    part: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """The batch of one call of a step graph, with the fields of its `CallRows`."""

    step: int
    draw: int
    microstep: int
    first_row: int
    rows: Rows
    batch: dict[str, torch.Tensor]
    part: int = 0


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows of a rank: `RankRows(...)(step)` returns its calls of a step, one for each microbatch of
    each global batch.

    With G = global_batch, global batch b of a single dataset is positions [b * G, (b + 1) * G) of
    the sampler's stream, for any world size; in a mixture it is the next G positions of its part's
    stream. Microbatch m of rank r of the data axis is the contiguous chunk m * data_ranks + r of
    the global batch.

    Law: over the data axis and all microbatches, the calls of a step have each position of its
    global batches exactly once.
    """

    recipe: Recipe
    order: BatchOrder
    plan: Plan
    rank: int

    def __call__(self, step: int) -> tuple[CallRows, ...]:
        count, whole = self.plan.rows_per_call, self.plan.global_batch
        lane = self.plan.data_index(self.rank)
        firsts = [
            (microstep * self.plan.data_ranks + lane) * count
            for microstep in range(self.plan.accumulate)
        ]
        before = draws_before(self.recipe, step)
        places = [self.order.part(before + draw) for draw in range(draws_of(self.recipe, step))]
        return tuple(
            CallRows(
                step,
                draw,
                microstep,
                first,
                self.order.rows(part, earlier, whole, first, count),
                part,
            )
            for draw, (part, earlier) in enumerate(places)
            for microstep, first in enumerate(firsts)
        )


class BatchStream:
    """An iterator over the batches of steps [start_step, stop_step), loaded by a thread that is
    `ahead` calls ahead.

    An error in the thread is raised by the `next` that would have returned that batch. Close the
    stream, or use it in a `with` statement; closing joins the thread.
    """

    def __init__(
        self,
        data: RunData,
        rows_fn: Callable[[int], Iterable[CallRows]],
        start_step: int,
        stop_step: int,
        *,
        ahead: int = 2,
    ) -> None:
        assert ahead >= 1
        self._ready: deque[Call] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._ended = False
        self._closed = False
        self._ahead = ahead
        steps = range(start_step, stop_step)
        self._thread = threading.Thread(
            target=self._load, args=(data, rows_fn, steps), name="batches", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Call]:
        return self

    def __next__(self) -> Call:
        """Return the next call's batch; raise StopIteration after the last one or after `close`, or
        the thread's error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            raise StopIteration

    def close(self) -> None:
        """End the thread, and discard loaded batches. It may be called several times."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _load(
        self, data: RunData, rows_fn: Callable[[int], Iterable[CallRows]], steps: range
    ) -> None:
        try:
            for step in steps:
                for call in rows_fn(step):
                    batch = data.batch(call.part, call.rows)
                    if not self._put(
                        Call(
                            call.step,
                            call.draw,
                            call.microstep,
                            call.first_row,
                            call.rows,
                            batch,
                            call.part,
                        )
                    ):
                        return
        except BaseException as error:  # noqa: BLE001  # raised by the consumer's `next`
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, call: Call) -> bool:
        """Wait for room, and append a call; return False if the stream was closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._ahead or self._closed)
            if self._closed:
                return False
            self._ready.append(call)
            self._changed.notify_all()
            return True
