"""Compile graphs with symbolic sizes for the sizes of the largest call, on which kernels for GPUs
depend.

Inductor chooses 32-bit or 64-bit indices, and the sizes of blocks, by a hint of each symbolic size.
In a graph as it was captured that is the size in the example batch: with the rows of a real batch a
32-bit index could overflow and address other memory.

Tested with torch 2.13.0 and 2.14.1. Private names used: `torch._inductor.codegen`,
`torch.utils._sympy`, `ShapeEnv.backed_var_to_val`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import SymInt
from torch.fx import GraphModule

from trainload.capture.source.patched import replaced

_LEAST_SIZE = 2
"""With a hint of 1 Inductor would compile for that size alone."""
_INT32 = torch.iinfo(torch.int32)


@contextlib.contextmanager
def sized_for(module: GraphModule, sizes: Mapping[str, int]) -> Iterator[None]:
    """Have Inductor compile a graph for calls of up to these sizes within the context.

    Kernels for GPUs then index in 64 bits where an address, or a value that is computed from
    indices, may not fit into 32 bits in the largest call. Smaller sizes stay possible.

    Args:
        module: a graph whose placeholders have `meta["val"]`.
        sizes: symbol -> its value in the largest call. Other symbols keep their hints. If it has
            none of the graph's, all kernels index in 64 bits.
    """
    environment = shape_environment(module)
    hints: dict[sympy.Symbol, Any] = {} if environment is None else environment.backed_var_to_val
    before = dict(hints)
    is_known = any(str(symbol) in sizes for symbol in before)
    for symbol in before:
        if str(symbol) in sizes:
            hints[symbol] = sympy.Integer(max(sizes[str(symbol)], _LEAST_SIZE))
    try:
        with _values_of_indices_considered(hints, all_wide=bool(before) and not is_known):
            yield
    finally:
        hints.update(before)


def shape_environment(module: GraphModule) -> Any:
    """Return the environment in which the symbolic sizes of a graph's inputs are defined; None if
    it has none.
    """
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            for size in (value,) if isinstance(value, SymInt) else getattr(value, "shape", ()):
                if isinstance(size, SymInt):
                    return size.node.shape_env
    return None


@contextlib.contextmanager
def _values_of_indices_considered(
    hints: Mapping[sympy.Symbol, Any], *, all_wide: bool
) -> Iterator[None]:
    """Have a kernel index in 64 bits if a value that it computes from indices needs them, or all
    kernels.

    Inductor makes arithmetic on `arange` part of the indices, and their type is chosen by the sizes
    of buffers alone. A product with a large constant would overflow, or not compile.
    """
    # imported here because it takes a second
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures

    chosen: Callable[[Any], torch.dtype] = SIMDKernelFeatures.select_index_dtype  # type: ignore[assignment]

    def select(features: Any) -> torch.dtype:
        dtype = chosen(features)
        if dtype is torch.int32 and (all_wide or not _fit(features, hints)):
            return torch.int64
        return dtype

    with replaced(SIMDKernelFeatures, "select_index_dtype", select):
        yield


def _fit(features: Any, hints: Mapping[sympy.Symbol, Any]) -> bool:
    """Return True if all index expressions of a kernel, and their parts, fit into 32 bits."""
    for node in features.scheduler_nodes():
        body = getattr(node, "_body", None)
        if body is None:
            continue
        sizes = {
            variable: sympy.sympify(size).xreplace(hints)
            for variable, size in body.var_ranges.items()
        }
        if not all(size.is_Integer for size in sizes.values()):
            return False  # sizes that depend on data
        largest = {variable: max(int(size) - 1, 0) for variable, size in sizes.items()}
        parts = {
            part
            for expression in body.indexing_exprs.values()
            for part in sympy.preorder_traversal(sympy.sympify(expression).xreplace(hints))
        }
        if not all(_fits(part, largest) for part in parts):
            return False
    return True


def _fits(expression: Any, largest: Mapping[sympy.Symbol, int]) -> bool:
    """Return True if an expression of variables, each from 0 to its largest value, fits into 32
    bits. Indices that are read from tensors are limited by the sizes of what they address.
    """
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    if not isinstance(expression, sympy.Expr):
        return True
    ranges = {symbol: ValueRanges(0, largest.get(symbol, 0)) for symbol in expression.free_symbols}
    bounds = bound_sympy(expression, ranges)
    return bool(bounds.lower >= _INT32.min and bounds.upper <= _INT32.max)
