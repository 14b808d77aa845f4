"""Compare operators of a flat graph without regard to which values they read."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.graphs import ADDED
from trainload.capture.operators import is_collective, is_overload

_ALIASES = frozenset(
    {
        "_unsafe_view",
        "_reshape_alias",
        "alias",
        "detach",
        "lift_fresh",
        "reshape",
        "contiguous",
        "to",
    }
)
"""Operators that may return their operand's memory although their schema does not say so for every
overload.
"""
_OF_MEMORY = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""Operators whose result depends on where in memory an operand begins, not on its value alone."""
_ALIGNMENT = 16
"""Bytes to which Inductor assumes that operands are aligned, if the first ones are."""


def can_be_outlined(node: Node) -> bool:
    """Return True if a node may be part of a region.

    Sizes, collectives, operators with bodies, operators that write to their operands, operators
    that read another part of the memory than their operand, and what a plan has added (slices of
    buckets, flat gradients) stay outside.
    """
    if node.op != "call_function" or is_size(node) or ADDED in node.meta:
        return False
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return can_be_outlined(source)
    return (
        is_overload(node.target)
        and not is_collective(node)
        and not node.target._schema.is_mutable
        and not depends_on_memory(node)
        and all(isinstance(n.meta.get("val"), Tensor | torch.SymInt) for n in operands_of(node))
    )


def is_size(node: Node) -> bool:
    """Return True if a node's value is a symbolic number."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def may_alias(node: Node) -> bool:
    """Return True if a node's value may share memory with one that it reads."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return may_alias(source)
    return is_overload(node.target) and (
        node.target.is_view or node.target.overloadpacket.__name__ in _ALIASES
    )


def depends_on_memory(node: Node) -> bool:
    """Return True if a node's value depends on where in memory its operand begins."""
    return is_overload(node.target) and node.target.overloadpacket.__name__ in _OF_MEMORY


def operands_of(node: Node) -> list[Node]:
    """Return the nodes that a node reads, in the order of its arguments, with repetitions."""
    operands: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), operands.append)
    return operands


def argument(node: Node, place: int, default: Any) -> Any:
    """Return a positional argument of a node, or the operator's default."""
    return node.args[place] if len(node.args) > place else default


def describe(value: Any) -> Hashable:
    """Return what a compiled region depends on in an operand: dtype, device, shape, strides and, on
    accelerators, the alignment of what is not a single number.
    """
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            str(value.device),
            tuple(map(str, value.shape)),
            tuple(map(str, value.stride())),
            value.device.type == "cpu" or not value.ndim or _misalignment(value),
        )
    if isinstance(value, list | tuple):
        return tuple(describe(each) for each in value)
    return str(value)


def _misalignment(value: Tensor) -> Hashable:
    offset: Any = value.storage_offset()
    if isinstance(offset, int):
        return offset * value.element_size() % _ALIGNMENT
    return str(offset)


def signature(node: Node) -> Hashable:
    """Return a key that is equal for operators that differ at most in which values they read and in
    the numbers among their arguments (see `numbers_of`).
    """
    numbers: list[int | float] = []
    return (
        str(node.target),
        _skeleton(node.args, numbers),
        _skeleton(node.kwargs, numbers),
        describe(node.meta["val"]),
        tuple(describe(operand.meta.get("val")) for operand in operands_of(node)),
    )


def numbers_of(node: Node) -> tuple[int | float, ...]:
    """Return the numbers that are arguments of a node, but not those in lists, such as shapes."""
    numbers: list[int | float] = []
    _skeleton(node.args, numbers)
    _skeleton(node.kwargs, numbers)
    return tuple(numbers)


def _skeleton(arguments: Any, numbers: list[int | float], *, depth: int = 0) -> Hashable:
    """Return the form of arguments with nodes and numbers left out; append the numbers."""
    if isinstance(arguments, Node):
        return "node"
    if isinstance(arguments, dict):
        return tuple(
            (name, _skeleton(value, numbers, depth=1)) for name, value in sorted(arguments.items())
        )
    if isinstance(arguments, list | tuple):
        return tuple(_skeleton(each, numbers, depth=depth + 1) for each in arguments)
    if depth == 1 and type(arguments) in (int, float):
        numbers.append(arguments)
        return "number"
    return repr(arguments)
