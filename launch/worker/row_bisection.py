"""Find the rows of a batch that cause a bad value, by computing the turn with fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Draw

_MOST_ROWS = 8
"""Maximum number of rows that are searched for."""


def causing_rows(draw: Draw, number: int, is_bad: Callable[[Draw], bool]) -> list[int]:
    """Return rows of a microbatch each of which causes a bad value, if all others are replaced by
    copies of it; or the fewest found that cause one together.

    Args:
        draw: the batch, with which the value is bad.
        number: number of the microbatch.
        is_bad: computes a batch, and returns True if the value is bad. It is called about
            2 * log2(rows) times for each row that is found.
    """
    microbatch = draw.microbatches[number]
    count = next(iter(microbatch.batch.values())).shape[0]

    def is_caused_by(rows: Sequence[int]) -> bool:
        kept = set(rows)
        index = torch.tensor([row if row in kept else rows[0] for row in range(count)])
        batch = {name: value.index_select(0, index) for name, value in microbatch.batch.items()}
        changed: list[Microbatch] = list(draw.microbatches)
        changed[number] = replace(microbatch, batch=batch)
        return is_bad(replace(draw, microbatches=changed))

    found: list[int] = []
    pending: list[list[int]] = [list(range(count))]
    while pending and len(found) < _MOST_ROWS:
        rows = pending.pop(0)
        if len(rows) == 1:
            found += rows
            continue
        middle = len(rows) // 2
        bad = [half for half in (rows[:middle], rows[middle:]) if is_caused_by(half)]
        if not bad:  # only together
            found += rows
        pending += bad
    return sorted(found)
