"""Evaluates a captured graph in float64, as the reference for bfloat16 and float16 graphs.

Two orders of the same bfloat16 operations differ by 3e-3, though neither is wrong: more than any
fixed tolerance that would still detect a fault. The difference depends on the graph and on its
values. So both are compared with the same graph in float64, and the captured one must be no further
from it than eager mode, up to a small factor.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.capture.operators import (
    calls_in,
    draws_nothing,
    graphs_in,
    is_higher_order,
    is_overload,
    is_seeded,
)
from trainload.capture.parity.distance import relative_distance
from trainload.capture.program import GraphCapture
from trainload.capture.source.quiet import ignore_torchs_warnings

_FACTOR = 3.0
"""Factor on eager mode's distance from float64: each side has its own rounding errors."""
_aten = torch.ops.aten
Key = tuple[str, str]
"""Kind and name of a value, such as ("gradient", "layer.weight")."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Values of one call in float64.

    Attributes:
        values: the values; None for the gradient of a parameter that the loss does not reach.
        typical: distance of eager mode from them, over all gradients together, but at least the
            rounding error of the least precise dtype in the graph. A single value of eager mode may
            be closer by chance.
    """

    values: Mapping[Key, Tensor | None]
    typical: float

    def allows(
        self, key: Key, expected: Tensor | None, got: Tensor | None, floor: float = 0.0
    ) -> bool:
        """Return True if a captured value is about as close to float64 as eager mode's.

        Up to a small factor it must be no further away.

        Args:
            key: key of the value.
            expected: value of eager mode.
            got: value of the captured graph.
            floor: like in `relative_distance`.
        """
        if (
            expected is None
            or got is None
            or expected.shape != got.shape
            or expected.dtype != got.dtype
        ):
            return False
        exact = self.values.get(key)
        if exact is None or not expected.is_floating_point():
            return False
        own = relative_distance(exact, expected.double(), floor)
        return relative_distance(exact, got.double(), floor) <= _FACTOR * max(own, self.typical)


def reference_of(
    capture: GraphCapture,
    call: Callable[[GraphCapture], Mapping[Key, Tensor | None]],
    gradients: Mapping[Key, Tensor | None],
) -> Reference | None:
    """Return the values of a graph in float64.

    None if it computes in full precision, or if one of its operators does not support float64.

    Args:
        capture: the graph.
        call: calls a graph on the compared inputs, in float64, and returns its values, including
            gradients.
        gradients: gradients of eager mode, by the same keys.
    """
    least = least_precise(capture.exported.graph_module)
    if torch.finfo(least).eps <= torch.finfo(torch.float32).eps:
        return None
    twin = in_float64(capture)
    try:
        values = call(twin)
    except Exception:  # noqa: BLE001  # torch's kernels may raise anything; the fixed tolerance holds then
        return None
    pairs = [
        (values[key], gradient)
        for key, gradient in gradients.items()
        if gradient is not None and values.get(key) is not None
    ]
    away = math.hypot(
        *(float((exact - eager.double()).norm()) for exact, eager in pairs if exact is not None)
    )
    whole = math.hypot(*(float(exact.norm()) for exact, _ in pairs if exact is not None))
    return Reference(values, max(away / whole if whole else 0.0, torch.finfo(least).eps / 2))


def least_precise(module: GraphModule) -> torch.dtype:
    """Return the floating-point dtype with the fewest digits among a graph's values.

    float32 if there is none.
    """
    dtypes = {
        value.dtype
        for node in calls_in(module)
        if isinstance(value := node.meta.get("val"), Tensor) and value.is_floating_point()
    }
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with floating-point ones in float64; tied names remain tied."""
    copies: dict[int, Tensor] = {}
    for value in tensors.values():
        if id(value) not in copies:
            copies[id(value)] = (
                value.detach().double().requires_grad_(value.requires_grad)
                if value.is_floating_point()
                else value
            )
    return {name: copies[id(value)] for name, value in tensors.items()}


def in_float64(capture: GraphCapture) -> GraphCapture:
    """Return a copy of a graph that computes in float64.

    Its floating-point inputs must be float64 too.

    Random numbers are drawn in their original dtype, so that they are the same.
    """
    exported = capture.exported
    shared_tensors = [
        value
        for store in (exported.state_dict, exported.constants)
        for value in store.values()
        if isinstance(value, Tensor)
    ]
    with warnings.catch_warnings():
        ignore_torchs_warnings()
        # the graph alone is copied
        twin = copy.deepcopy(exported, {id(value): value for value in shared_tensors})
    for module in graphs_in(twin.graph_module):
        for node in list(module.graph.nodes):
            if node.op != "call_function" or is_higher_order(node.target):
                continue
            if is_seeded(node.target) and not draws_nothing(node.target, node.args, node.kwargs):
                _draw_as_before(module, node)
            elif is_overload(node.target):
                node.args = tuple(_to_float64(value) for value in node.args)
                node.kwargs = {name: _to_float64(value) for name, value in node.kwargs.items()}
        module.recompile()
    return replace(capture, exported=twin)


def _to_float64(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _draw_as_before(module: GraphModule, node: Node) -> None:
    """Cast a random operator's operands to their original dtypes, and its results back."""
    with module.graph.inserting_before(node):
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, Tensor) and value.is_floating_point():
                node.replace_input_with(
                    source, module.graph.call_function(_aten.to.dtype, (source, value.dtype))
                )
    results = [node] if isinstance(node.meta.get("val"), Tensor) else list(node.users)
    for result in results:
        value = result.meta.get("val")
        if isinstance(value, Tensor) and value.is_floating_point():
            users = list(result.users)
            with module.graph.inserting_after(result):
                raised = module.graph.call_function(_aten.to.dtype, (result, torch.float64))
            for user in users:
                user.replace_input_with(result, raised)
