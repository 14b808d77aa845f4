"""Gradients of fused attention on GPUs that are the same, bit for bit, in every call.

torch's kernels add them in the order in which their blocks end, unless deterministic algorithms are
required. To require them of a whole step would fail wherever an operator has no such algorithm, so
they are required of these operators alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

_NAMESPACE = "trainload"
_GRADIENTS = (
    "_efficient_attention_backward",
    "_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
)
"""Operators whose kernels have a deterministic form that a preference does not choose."""


def require_deterministic_attention(module: GraphModule) -> int:
    """Replace the gradients of attention in a graph by operators that compute the same
    deterministically. In place.

    Returns:
        Number of operators that were replaced.
    """
    replaced = 0
    for part in module.modules():  # bodies of control flow are modules of their own
        nodes = part.graph.nodes if isinstance(part, GraphModule) else ()
        found = [node for node in nodes if node.op == "call_function"]
        found = [node for node in found if node.target in _replacements()]
        for node in found:
            node.target = _replacements()[node.target]
        if found and isinstance(part, GraphModule):
            part.recompile()
        replaced += len(found)
    return replaced


def define_operators() -> None:
    """Define the operators that replace others, for graphs that were compiled elsewhere."""
    _replacements()


@functools.cache
def _replacements() -> dict[Any, Any]:
    """Return operator -> the one that replaces it. They are defined at the first call."""
    return {
        original: _defined(name, original)
        for name in _GRADIENTS
        for original in (getattr(torch.ops.aten, name).default,)
    }


def _defined(name: str, original: Any) -> Any:
    """Define an operator with the schema of another one, and return it."""
    schema = str(original._schema).removeprefix(f"aten::{name}")
    torch.library.define(f"{_NAMESPACE}::{name}", schema)
    torch.library.impl(f"{_NAMESPACE}::{name}", "default", _requiring(original))
    torch.library.register_fake(f"{_NAMESPACE}::{name}", original)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _requiring(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that requires deterministic algorithms while it calls another one."""

    def call(*args: Any, **options: Any) -> Any:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return function(*args, **options)
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)

    return call
