"""Compute the number of rows that fit into a GPU's free memory when a graph runs interpreted.

Interpreted graphs need more memory than compiled ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from trainload.autograd_trace.graphs import Port
from trainload.sharding.analysis.liveness import held
from trainload.sharding.planner.plan_costs import sizes_of

_USABLE_FRACTION = 0.5
"""Usable fraction of the free memory: kernels need workspace, and the allocator's memory is
fragmented. With 0.8, fragments of 512 MiB on an H200 could not be used, and a call with one more
row ran out of memory.
"""


def fitting_rows(
    module: GraphModule, inputs: Sequence[Port], rows: int, device: torch.device
) -> int:
    """Return the number of rows, at least one and at most `rows`, with which a graph fits into a
    GPU's free memory.

    Args:
        module: the graph; every node has `meta["val"]`.
        inputs: ports of its arguments. Those of a batch have a symbolic number of rows.
        rows: number of rows of the call.
        device: device of the call. For a CPU, `rows` is returned.
    """
    if device.type != "cuda":
        return rows
    return rows_within(module, inputs, rows, int(_USABLE_FRACTION * free_bytes(device)))


def rows_within(module: GraphModule, inputs: Sequence[Port], rows: int, memory: int) -> int:
    """Return `rows`, halved until the graph's peak is at most `memory` bytes; at least one."""
    while rows > 1 and held(module, sizes_of(module, inputs, rows)).peak > memory:
        rows //= 2
    return rows


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a GPU: the device's free memory, and
    the allocator's unused reserve.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
