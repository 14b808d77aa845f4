"""Between a parameter and its shares on the tensor axis, in intervals of their flattened elements.

Flattened, a whole parameter is runs of equal length, dealt out to the ranks in turns: of row shares one run for each rank, of column shares
a short run for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from trainload.sharding.plan import Shard

PIECE = 2**22
"""Elements of a whole parameter that are looked at together, where runs are shorter."""


def run_length(shape: Sequence[int], shard: Shard) -> int:
    """Elements in a row that a share of this shape has of the whole."""
    return shape[shard.dim] // shard.blocks * math.prod(shape[shard.dim + 1 :])


def read_share(
    whole: Callable[[int, int], torch.Tensor], shape: Sequence[int], shard: Shard, ranks: int, index: int, start: int, stop: int
) -> torch.Tensor:
    """Elements [start, stop) of a rank's flattened share.

    Args:
        whole: reads elements [start, stop) of the flattened parameter; is asked for intervals that begin and end with this rank's elements.
        shape: of the share.
        shard: how the parameter is divided.
        ranks: among how many.
        index: the rank's number among them.
        start: the first element.
        stop: the one after the last.
    """
    run = run_length(shape, shard)
    if not run or start == stop:
        return whole(0, 0)
    found: list[torch.Tensor] = []
    rows = max(1, PIECE // (run * ranks))
    first, last = start // run, -(-stop // run)
    for low in range(first, last, rows):
        high = min(last, low + rows)
        begin = (low * ranks + index) * run
        ahead = max(0, start - low * run)
        behind = max(0, high * run - stop)
        if high - low == 1:
            found.append(whole(begin + ahead, begin + run - behind))
            continue
        seen = whole(begin, begin + (high - low - 1) * ranks * run + run)
        own = torch.as_strided(seen, (high - low, run), (ranks * run, 1)).reshape(-1)
        found.append(own[ahead : own.numel() - behind])
    return found[0] if len(found) == 1 else torch.cat(found)


def read_whole(
    share: Callable[[int, int, int], torch.Tensor], shape: Sequence[int], shard: Shard, ranks: int, start: int, stop: int
) -> torch.Tensor:
    """Elements [start, stop) of a flattened parameter.

    Args:
        share: (index, start, stop) -> elements [start, stop) of a rank's flattened share.
        shape: of one share.
        shard: how the parameter is divided.
        ranks: among how many.
        start: the first element.
        stop: the one after the last.
    """
    run = run_length(shape, shard)
    if not run or start == stop:
        return share(0, 0, 0)
    found: list[torch.Tensor] = []
    rows = max(1, PIECE // (run * ranks))
    first, last = start // (run * ranks), -(-stop // (run * ranks))
    for low in range(first, last, rows):
        high = min(last, low + rows)
        begin, end = max(start, low * run * ranks), min(stop, high * run * ranks)
        if high - low == 1:
            found += [share(index, low * run + a, low * run + b) for index, a, b in _cut(begin, end, low, run, ranks)]
            continue
        parts = [share(index, low * run, high * run).view(high - low, run) for index in range(ranks)]
        found.append(torch.stack(parts, 1).reshape(-1)[begin - low * run * ranks : end - low * run * ranks])
    return found[0] if len(found) == 1 else torch.cat(found)


def _cut(begin: int, end: int, row: int, run: int, ranks: int) -> list[tuple[int, int, int]]:
    """One row of runs, [begin, end) of the whole: (rank, first, last) of each run that it touches, within the run."""
    found = []
    for index in range(ranks):
        at = (row * ranks + index) * run
        low, high = max(begin, at), min(end, at + run)
        if low < high:
            found.append((index, low - at, high - at))
    return found
