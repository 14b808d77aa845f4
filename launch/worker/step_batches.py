"""The global batches of a step, out of the stream of a rank's calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from trainload.autograd_trace.graphs import Recipe
from trainload.autograd_trace.optimizer.rounds import draws_of
from trainload.capture.guards.dispatch import Dispatcher
from trainload.launching.data.prefetch import Call
from trainload.launching.data.run_data import RunData
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Draw


def next_calls(stream: Iterator[Call], recipe: Recipe, step: int, accumulate: int) -> list[list[Call]]:
    """A rank's calls of a step, by the global batches that it draws. Waits until they are read."""
    return [list(itertools.islice(stream, accumulate)) for _ in range(draws_of(recipe, step))]


def draw_of(calls: Sequence[Call], data: RunData, dispatcher: Dispatcher) -> Draw:
    """A global batch with the variant that takes it: the same one on every rank, since all of them have rows of one part."""
    constants = data.parts[calls[0].part].constants
    return Draw(
        [Microbatch(call.batch, call.first_row, call.rows, call.part) for call in calls], dispatcher.pick({**calls[0].batch, **constants})
    )
