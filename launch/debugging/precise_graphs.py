"""Compute a graph in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.fx.node import map_aggregate

from trainload.capture.operators import is_higher_order

_VIEWS_OF_BITS = frozenset({torch.ops.aten.view.dtype})


class Precise(Interpreter):
    """An interpreter that computes every floating value of a graph in float64.

    Operators whose inputs have no floating values, such as random ones, bodies of control flow, and
    operators that do not support float64 are computed in their own dtypes. Results of the graph
    have their own dtypes.
    """

    def run_node(self, n: Node) -> Any:
        """Compute a node in float64."""
        if n.op != "call_function":
            return map_aggregate(super().run_node(n), _widened)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if is_higher_order(n.target) or n.target in _VIEWS_OF_BITS or not _has_floats(args, kwargs):
            return self._in_own_dtypes(n, args, kwargs)
        try:
            value = n.target(*_precise(args), **_precise(kwargs))  # type: ignore[operator]  # it is a function
        except (RuntimeError, TypeError):  # it does not support float64
            return self._in_own_dtypes(n, args, kwargs)
        return map_aggregate(value, _widened)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of the graph in their own dtypes."""
        results = super().output(target, args, kwargs)
        graph: Any = self.module.graph
        specs = graph.output_node().args[0]
        return tuple(_like(value, node) for value, node in zip(results, specs, strict=True))

    def _in_own_dtypes(self, n: Node, args: Any, kwargs: Any) -> Any:
        sources = iter(n.all_input_nodes)
        own = {id(self.env[source]): source for source in sources}

        def narrowed(value: Any) -> Any:
            return _like(value, own[id(value)]) if id(value) in own else value

        value = n.target(*map_aggregate(args, narrowed), **map_aggregate(kwargs, narrowed))  # type: ignore[operator]
        return map_aggregate(value, _widened)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def _precise(arguments: Any) -> Any:
    return map_aggregate(
        arguments,
        lambda each: (
            torch.float64 if isinstance(each, torch.dtype) and each.is_floating_point else each
        ),
    )


def _has_floats(args: Any, kwargs: Any) -> bool:
    found: list[bool] = []
    map_aggregate(
        (args, kwargs),
        lambda each: found.append(isinstance(each, Tensor) and each.is_floating_point()),
    )
    return any(found)


def _like(value: Any, node: Any) -> Any:
    """Return a value in the dtypes of a node's."""
    spec = node.meta.get("val") if isinstance(node, Node) else None
    if isinstance(value, Tensor) and isinstance(spec, Tensor) and value.is_floating_point():
        return value.to(spec.dtype)
    if isinstance(value, tuple | list) and isinstance(spec, tuple | list):
        return type(value)(
            each.to(own.dtype)
            if isinstance(each, Tensor) and each.is_floating_point() and isinstance(own, Tensor)
            else each
            for each, own in zip(value, spec, strict=True)
        )
    return value
