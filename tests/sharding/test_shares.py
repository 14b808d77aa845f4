"""Intervals of shares and of whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import cut

from trainload.sharding.plans.plan import Shard
from trainload.sharding.rewriting import shares
from trainload.sharding.rewriting.shares import fill_share, fill_whole


@st.composite
def divided(draw: st.DrawFn) -> tuple[torch.Tensor, Shard, int]:
    """Return a parameter with distinct elements, and a way to divide it."""
    ranks, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= ranks * blocks
    return torch.arange(math.prod(shape)).reshape(shape), Shard(dim=dim, blocks=blocks), ranks


PIECES = st.sampled_from([1, 7, shares.PIECE])
"""Number of elements that are processed together."""


def filling(tensor: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
    """Return a function that reads elements of the flattened tensor, starting at `low`."""

    def fill(low: int, into: torch.Tensor) -> None:
        into.copy_(tensor.flatten()[low : low + len(into)])

    return fill


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(piece=PIECES, case=divided(), data=st.data())
def test_an_interval_of_a_share_is_its_slice(
    piece: int, case: tuple[torch.Tensor, Shard, int], data: st.DataObject
) -> None:
    whole, shard, ranks = case
    index = data.draw(st.integers(0, ranks - 1))
    own = cut(whole, shard, index, ranks)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, own.numel())] * 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "PIECE", piece)
        found = torch.full((stop - start,), -1)
        fill_share(filling(whole), own.shape, shard, ranks, index, start, found)
    assert torch.equal(found, own.flatten()[start:stop])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(piece=PIECES, case=divided(), data=st.data())
def test_an_interval_of_the_whole_is_made_of_shares(
    piece: int, case: tuple[torch.Tensor, Shard, int], data: st.DataObject
) -> None:
    whole, shard, ranks = case
    own = [cut(whole, shard, index, ranks) for index in range(ranks)]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "PIECE", piece)
        found = torch.full((stop - start,), -1)
        fill_whole(
            lambda index, low, into: filling(own[index])(low, into),
            own[0].shape,
            shard,
            ranks,
            start,
            found,
        )
    assert torch.equal(found, whole.flatten()[start:stop])


def test_rows_are_read_without_their_neighbours() -> None:
    whole, asked = torch.arange(64).reshape(8, 8), []

    def reads(low: int, into: torch.Tensor) -> None:
        asked.append((low, low + len(into)))
        filling(whole)(low, into)

    fill_share(reads, (4, 8), Shard(dim=0), 2, 1, 3, torch.empty(17, dtype=torch.int64))
    assert asked == [(35, 52)]


def test_no_more_of_shares_is_read_than_the_rows_that_an_interval_touches() -> None:
    whole, asked = torch.arange(64).reshape(8, 8), []
    own = [cut(whole, Shard(dim=0), index, 2) for index in range(2)]

    def reads(index: int, low: int, into: torch.Tensor) -> None:
        asked.append((index, low, low + len(into)))
        filling(own[index])(low, into)

    fill_whole(reads, (4, 8), Shard(dim=0), 2, 30, torch.empty(10, dtype=torch.int64))
    assert asked == [(0, 30, 32), (1, 0, 8)]
