"""Shares of tensors, cut with torch's own chunk and cat."""

from __future__ import annotations

import torch
from torch import Tensor

from trainload.sharding.plans.plan import Shard


def cut(whole: Tensor, shard: Shard, index: int, ranks: int) -> Tensor:
    """Return the share of rank `index`: its chunk of each block."""
    blocks = whole.chunk(shard.blocks, shard.dim)
    return torch.cat([block.chunk(ranks, shard.dim)[index] for block in blocks], shard.dim)
