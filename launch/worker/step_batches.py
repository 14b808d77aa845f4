"""Group the stream of a rank's calls into the global batches of a step."""

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


def next_calls(
    stream: Iterator[Call], recipe: Recipe, step: int, accumulate: int
) -> list[list[Call]]:
    """Return a rank's calls of a step, grouped by global batch. Waits until they are read."""
    return [list(itertools.islice(stream, accumulate)) for _ in range(draws_of(recipe, step))]


def draw_of(calls: Sequence[Call], data: RunData, dispatcher: Dispatcher) -> Draw:
    """Return a global batch with the variant that accepts it.

    It is the same variant on every rank, since the rows of all ranks are of one part.
    """
    constants = data.parts[calls[0].part].constants
    return Draw(
        [Microbatch(call.batch, call.first_row, call.rows, call.part) for call in calls],
        dispatcher.pick({**calls[0].batch, **constants}),
    )
