"""The order of collectives, copies to and from the host, and waits, in a graph and in the code that
Inductor writes for it.
"""

from __future__ import annotations

import re

import torch
from torch.fx import GraphModule

from trainload.autograd_trace.recompute.host_copies import (
    OFFLOAD,
    OFFLOADED,
    RELOAD,
    RELOADED,
)
from trainload.capture.operators import is_collective

_VALUE = r"(?:reinterpret_tensor\()?(\w+)"
_CALL = re.compile(
    r"(buf\d+) = torch\.ops\.(?:_c10d_functional\.|trainload\.(?=offload|reload))(\w+?)"
    r"(?:_out)?\.default\("
)
_IN_PLACE = re.compile(rf"torch\.ops\._c10d_functional\.(all_reduce)_\.default\({_VALUE}")
_WAIT = re.compile(rf"torch\.ops\._c10d_functional\.wait_tensor\.default\({_VALUE}")
_COPIES = (OFFLOAD, OFFLOADED, RELOAD, RELOADED)
_wait = torch.ops._c10d_functional.wait_tensor.default
_mm = torch.ops.aten.mm.default


def order_of_graph(module: GraphModule, *, products: bool = False) -> list[str]:
    """Return the collectives and copies of a graph and the waits for them, numbered as they begin.

    Args:
        module: the graph.
        products: True to add the matrix products between them.
    """
    numbers: dict[object, int] = {}
    done: list[str] = []
    for node in module.graph.nodes:
        if node.target is _wait:
            done.append(f"wait {numbers[node.args[0]]}")
        elif is_collective(node) or node.target in _COPIES:
            numbers[node] = len(numbers)
            done.append(f"{node.target.overloadpacket.__name__.rstrip('_')} {numbers[node]}")
        elif products and node.target is _mm:
            done.append("mm")
    return done


def order_of_code(code: str, *, products: bool = False) -> list[str]:
    """Return the same of the code that Inductor wrote for a graph."""
    numbers: dict[str, int] = {}  # variable -> number of the collective that wrote it last
    begun = 0
    done: list[str] = []
    for line in code[code.index("def call(") :].splitlines():
        if found := _WAIT.search(line):
            done.append(f"wait {numbers[found[1]]}")
        elif found := _IN_PLACE.search(line):
            numbers[found[2]], begun = begun, begun + 1
            done.append(f"all_reduce {numbers[found[2]]}")
        elif found := _CALL.search(line):
            numbers[found[1]], begun = begun, begun + 1
            done.append(f"{found[2].rstrip('_')} {numbers[found[1]]}")
        elif products and "extern_kernels.mm(" in line:
            done.append("mm")
    return done
