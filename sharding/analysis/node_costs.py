"""Costs of a node of a step graph: operations, and bytes read and written."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from trainload.sharding.analysis.graph_nodes import arguments

aten = torch.ops.aten
Sizes = Mapping[str, int]
"""Symbol of a size -> its value."""
EXAMPLE: Sizes = MappingProxyType({})
"""Sizes of the example batch."""


def number(size: Any, sizes: Sizes = EXAMPLE) -> int:
    """Return a size as a number: the example batch's if `sizes` lacks one of its symbols; 0 if it
    is data-dependent.
    """
    if not isinstance(size, SymInt):
        return int(size)
    expression = size.node.expr
    names = _symbols(expression)
    if all(name in sizes for name in names):
        return _evaluate(expression, tuple(sizes[name] for name in names))
    return int(size.node.hint) if size.node.has_hint() else 0


_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten._scaled_mm_v2}
_GROUPED = {aten._grouped_mm, aten._scaled_grouped_mm, aten._scaled_grouped_mm_v2}
_FLEX = {"flex_attention": 2, "flex_attention_backward": 5}
"""Higher-order operator -> its products. Blocks that its mask skips are counted, since data decide
them.
"""


@functools.lru_cache(maxsize=4096)
def _symbols(expression: Any) -> tuple[str, ...]:
    return tuple(sorted(map(str, expression.free_symbols)))


@functools.lru_cache(maxsize=4096)
def _evaluate(expression: Any, values: tuple[int, ...]) -> int:
    """Evaluate a sympy expression with values for its symbols, in the order of their names."""
    values_by_name = dict(zip(_symbols(expression), values, strict=True))
    return max(
        0,
        int(
            expression.xreplace(
                {symbol: values_by_name[str(symbol)] for symbol in expression.free_symbols}
            )
        ),
    )


def flops(node: Node, sizes: Sizes = EXAMPLE) -> float:
    """Return the multiplications and additions of a node that multiplies matrices; 0 for any
    other.
    """
    packet = getattr(node.target, "overloadpacket", None)
    left: Any
    if packet in _PRODUCTS:
        left = node.args[1 if packet in (aten.addmm, aten.baddbmm) else 0]
        return 2.0 * elements(node.meta["val"], sizes) * number(left.meta["val"].shape[-1], sizes)
    if packet in _GROUPED:
        return _grouped_flops(node, sizes)
    if getattr(node.target, "__name__", "") in _FLEX:
        query, key = (node.args[at].meta["val"] for at in (0, 1))  # type: ignore[union-attr]
        products = _FLEX[node.target.__name__]  # type: ignore[union-attr]
        return 2.0 * products * elements(query, sizes) * number(key.shape[2], sizes)
    if packet is aten.convolution:
        return (
            2.0
            * elements(node.meta["val"], sizes)
            * _products_per_output(arguments(node)["weight"], sizes)
        )
    if packet is aten.convolution_backward:
        args = arguments(node)
        needed = sum(args["output_mask"][:2])
        return float(
            2.0
            * needed
            * elements(args["grad_output"].meta["val"], sizes)
            * _products_per_output(args["weight"], sizes)
        )
    if "scaled_dot_product" in str(packet):
        args = arguments(node)
        products = 5 if "grad_out" in args or "grad_output" in args else 2
        attended = 0.5 if args.get("is_causal") else 1.0
        keys = number(args["key"].meta["val"].shape[2], sizes)
        return 2.0 * products * attended * elements(args["query"].meta["val"], sizes) * keys
    return 0.0


def _grouped_flops(node: Node, sizes: Sizes) -> float:
    """Return the operations of a product of matrices in groups.

    If both operands are matrices, each group multiplies its own columns of the first one by its own
    rows of the second one. Otherwise each element of the result has the operations of one product.
    """
    left, right = (node.args[at].meta["val"] for at in (0, 1))  # type: ignore[union-attr]
    inner = number(left.shape[-1], sizes)
    if left.ndim == right.ndim == 2:
        return 2.0 * number(left.shape[0], sizes) * number(right.shape[1], sizes) * inner
    return 2.0 * elements(node.meta["val"], sizes) * inner


def elements(value: object, sizes: Sizes = EXAMPLE) -> float:
    """Return the number of elements of a tensor, or of the first of several; 0 for any other
    value.
    """
    first = value[0] if isinstance(value, tuple | list) and value else value
    return (
        float(math.prod(number(size, sizes) for size in first.shape))
        if isinstance(first, Tensor)
        else 0.0
    )


def bytes_of(node: Node, sizes: Sizes = EXAMPLE) -> float:
    """Return the bytes of a node's tensors; 0 if it has none."""
    value = node.meta.get("val")
    tensors = [
        v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, Tensor)
    ]
    return sum((elements(t, sizes) * t.element_size() for t in tensors), 0.0)


def moved_bytes(node: Node, sizes: Sizes = EXAMPLE) -> float:
    """Return the bytes of the tensors that a node reads and writes."""
    return bytes_of(node, sizes) + sum(bytes_of(source, sizes) for source in node.all_input_nodes)


def _products_per_output(weight: Node, sizes: Sizes) -> float:
    return float(math.prod(number(size, sizes) for size in weight.meta["val"].shape[1:]))
