"""Between a parameter and its shares on the tensor axis, in intervals of their flattened elements.

Flattened, a whole parameter is runs of equal length, dealt out to the ranks in turns: of row shares one run for each rank, of column shares
a short run for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from trainload.packaging.tensors.safetensors_file import to_fill
from trainload.sharding.plans.plan import Shard

PIECE = 2**22
"""Elements of a whole parameter that are looked at together, where runs are shorter."""


def run_length(shape: Sequence[int], shard: Shard) -> int:
    """Elements in a row that a share of this shape has of the whole."""
    return shape[shard.dim] // shard.blocks * math.prod(shape[shard.dim + 1 :])


def fill_share(
    whole: Callable[[int, torch.Tensor], None], shape: Sequence[int], shard: Shard, ranks: int, index: int, start: int, into: torch.Tensor
) -> None:
    """Reads elements of a rank's flattened share, from `start` on, as many as `into` has.

    Args:
        whole: (start, into) -> reads elements of the flattened parameter; is asked for intervals that begin and end with this rank's.
        shape: of the share.
        shard: how the parameter is divided.
        ranks: among how many.
        index: the rank's number among them.
        start: the first element.
        into: 1-dim and contiguous.
    """
    run, stop = run_length(shape, shard), start + len(into)
    if not run or start == stop:
        return
    rows = max(1, PIECE // (run * ranks))
    first, last = start // run, -(-stop // run)
    for low in range(first, last, rows):
        high = min(last, low + rows)
        begin, end = max(start, low * run), min(stop, high * run)
        own = into[begin - start : end - start]
        if high - low == 1:
            whole((low * ranks + index) * run + begin - low * run, own)
            continue
        seen = to_fill(((high - low - 1) * ranks * run + run,), into.dtype)
        whole((low * ranks + index) * run, seen)
        _copy_flat(torch.as_strided(seen, (high - low, run), (ranks * run, 1)), begin - low * run, own)


def fill_whole(
    share: Callable[[int, int, torch.Tensor], None], shape: Sequence[int], shard: Shard, ranks: int, start: int, into: torch.Tensor
) -> None:
    """Reads elements of a flattened parameter, from `start` on, as many as `into` has.

    Args:
        share: (index, start, into) -> reads elements of a rank's flattened share.
        shape: of one share.
        shard: how the parameter is divided.
        ranks: among how many.
        start: the first element.
        into: 1-dim and contiguous.
    """
    run, stop = run_length(shape, shard), start + len(into)
    if not run or start == stop:
        return
    rows = max(1, PIECE // (run * ranks))
    first, last = start // (run * ranks), -(-stop // (run * ranks))
    for low in range(first, last, rows):
        high = min(last, low + rows)
        begin, end = max(start, low * run * ranks), min(stop, high * run * ranks)
        own = into[begin - start : end - start]
        if high - low == 1:
            at = 0
            for index, a, b in _cut(begin, end, low, run, ranks):
                share(index, low * run + a, own[at : at + b - a])
                at += b - a
            continue
        parts = to_fill((ranks, high - low, run), into.dtype)
        for index in range(ranks):
            share(index, low * run, parts[index].view(-1))
        _copy_flat(parts.transpose(0, 1), begin - low * run * ranks, own)


def _copy_flat(source: torch.Tensor, start: int, into: torch.Tensor) -> None:
    """Elements of a tensor, flattened, from `start` on, without a copy of all where all are wanted."""
    if len(into) == source.numel():
        into.view(source.shape).copy_(source)
    else:
        into.copy_(source.reshape(-1)[start : start + len(into)])


def _cut(begin: int, end: int, row: int, run: int, ranks: int) -> list[tuple[int, int, int]]:
    """One row of runs, [begin, end) of the whole: (rank, first, last) of each run that it touches, within the run."""
    found = []
    for index in range(ranks):
        at = (row * ranks + index) * run
        low, high = max(begin, at), min(end, at + run)
        if low < high:
            found.append((index, low - at, high - at))
    return found
