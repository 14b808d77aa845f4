"""Convert between a parameter and its shares on the tensor axis, in intervals of their flattened
elements.

A flattened whole parameter consists of runs of equal length, dealt to the ranks in turn: for row
shares one run for each rank, for column shares a short run for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from trainload.packaging.tensors.safetensors_file import to_fill
from trainload.sharding.plans.plan import Shard

PIECE = 2**22
"""Number of elements of a whole parameter that are processed together if runs are shorter."""


def run_length(shape: Sequence[int], shard: Shard) -> int:
    """Return the number of consecutive elements of the whole parameter in a share of this shape."""
    return shape[shard.dim] // shard.blocks * math.prod(shape[shard.dim + 1 :])


def fill_share(
    whole: Callable[[int, torch.Tensor], None],
    shape: Sequence[int],
    shard: Shard,
    ranks: int,
    index: int,
    start: int,
    into: torch.Tensor,
) -> None:
    """Read elements of a rank's flattened share from `start` on, as many as `into` has.

    Args:
        whole: (start, into) -> reads elements of the flattened parameter; called for intervals that
            begin and end with this rank's elements.
        shape: shape of the share.
        shard: division of the parameter.
        ranks: number of ranks.
        index: the rank's index among them.
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
        buffer = to_fill(((high - low - 1) * ranks * run + run,), into.dtype)
        whole((low * ranks + index) * run, buffer)
        _copy_flat(
            torch.as_strided(buffer, (high - low, run), (ranks * run, 1)), begin - low * run, own
        )


def fill_whole(
    share: Callable[[int, int, torch.Tensor], None],
    shape: Sequence[int],
    shard: Shard,
    ranks: int,
    start: int,
    into: torch.Tensor,
) -> None:
    """Read elements of a flattened parameter from `start` on, as many as `into` has.

    Args:
        share: (index, start, into) -> reads elements of a rank's flattened share.
        shape: shape of one share.
        shard: division of the parameter.
        ranks: number of ranks.
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
            for index, a, b in _run_intervals(begin, end, low, run, ranks):
                share(index, low * run + a, own[at : at + b - a])
                at += b - a
            continue
        parts = to_fill((ranks, high - low, run), into.dtype)
        for index in range(ranks):
            share(index, low * run, parts[index].view(-1))
        _copy_flat(parts.transpose(0, 1), begin - low * run * ranks, own)


def _copy_flat(source: torch.Tensor, start: int, into: torch.Tensor) -> None:
    """Copy flattened elements of a tensor from `start` on, without an intermediate copy if all are
    needed.
    """
    if len(into) == source.numel():
        into.view(source.shape).copy_(source)
    else:
        into.copy_(source.reshape(-1)[start : start + len(into)])


def _run_intervals(
    begin: int, end: int, row: int, run: int, ranks: int
) -> list[tuple[int, int, int]]:
    """Return (rank, first, last) within the run for each run that [begin, end) touches in one row
    of runs.
    """
    pieces = []
    for index in range(ranks):
        at = (row * ranks + index) * run
        low, high = max(begin, at), min(end, at + run)
        if low < high:
            pieces.append((index, low - at, high - at))
    return pieces
