"""How many rows of a batch there is memory for where a graph runs interpreted, which needs more than compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from trainload.autograd_trace.graphs import Port
from trainload.sharding.liveness import held
from trainload.sharding.planner.costs import sizes_of

_PART = 0.5
"""Of the memory that is left, so much is counted on: kernels have their own work space, and allocators leave gaps. With a part of 0.8,
512 MiB lay in gaps on an H200, and a call of one row more ended there."""


def fitting_rows(module: GraphModule, inputs: Sequence[Port], rows: int, device: torch.device) -> int:
    """Return with how many rows, at most `rows` and at least one, a graph fits into what is left of a GPU's memory.

    Args:
        module: the graph; every node has `meta["val"]`.
        inputs: what its arguments are. Those of a batch have a symbolic number of rows.
        rows: of the call that is to be made.
        device: where it runs. Only a GPU's memory is looked at: a machine's can be swapped and shared.
    """
    if device.type != "cuda":
        return rows
    return rows_within(module, inputs, rows, int(_PART * free_bytes(device)))


def rows_within(module: GraphModule, inputs: Sequence[Port], rows: int, memory: int) -> int:
    """Return with how many rows, `rows` halved until it fits, a graph makes at most so many bytes at a time; at least one."""
    while rows > 1 and held(module, sizes_of(module, inputs, rows)).peak > memory:
        rows //= 2
    return rows


def free_bytes(device: torch.device) -> int:
    """Return what a GPU's allocator can still give to this process: what nobody has, and what it has reserved and not given out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
