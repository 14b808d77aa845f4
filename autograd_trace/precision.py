"""Change the precision that a captured graph computes in, as torch.autocast would.

Operators that torch lists for low precision run in it, those that it lists for float32 run in
float32; there is no list of our own. The whole graph is put into an autocast region, as if the
job's loss had been computed under one, or its regions are disabled. Then it is run once on fake
tensors to find the resulting dtypes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from trainload.capture.operators import calls_in, graphs_in, is_higher_order, nodes_in
from trainload.capture.program import GraphCapture, OutputRole
from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching.higher_order import evaluate, is_ours
from trainload.core.errors import JobError, first_line

aten = torch.ops.aten
_HOP: Any = torch.ops.higher_order
_BODY = "in_autocast"
_LOW = (torch.bfloat16, torch.float16)
_REFREEZE = "Freeze the job again in this precision."


def in_precision(capture: GraphCapture, dtype: torch.dtype) -> GraphModule | None:
    """Return a captured graph in another precision. Its nodes have the dtypes of their new values.

    Args:
        capture: the graph. It is changed, and must not be used any more.
        dtype: bfloat16 or float16 to run the whole graph under autocast to that dtype, including
            regions under autocast to another dtype; regions that disable autocast stay as they are.
            float32 to run without autocast.

    Returns:
        The graph, or None if no value would change its dtype.

    Raises:
        JobError: the graph does not allow it.
    """
    module, where, low = (
        capture.exported.graph_module,
        f"precision, graph {capture.name}",
        dtype in _LOW,
    )
    control = next(
        (
            node
            for node in calls_in(module)
            if is_higher_order(node.target) and not _is_region(node)
        ),
        None,
    )
    if control is not None:
        raise JobError(
            "the graph has control flow, whose bodies were captured for fixed dtypes",
            where=where,
            got=f"{control.target} at {place_of_node(control)}",
            hint=_REFREEZE,
        )
    _forget_dtypes(module)
    before = [dtype_of(node) for node in calls_in(module)]
    declared = [dtype_of(node) for node in _results(module)]
    for node in calls_in(module):
        if node.target is _HOP.wrap_with_autocast and node.args[2]:
            device, was, _, *rest = node.args
            node.args = (device, dtype if low else was, low, *rest)
    _DtypeUpdater(module, where).run_under(dtype if low else None)
    if before == [dtype_of(node) for node in calls_in(module)]:
        return None
    strange = next(
        (
            node
            for node in nodes_in(module)
            if dtype_of(node) in _LOW and dtype_of(node) is not dtype
        ),
        None,
    )
    if strange is not None:
        raise JobError(
            f"a value stays in {str(dtype_of(strange)).removeprefix('torch.')}: it was not"
            " converted by autocast",
            where=where,
            got=f"{strange.target} at {place_of_node(strange)}",
            hint=_REFREEZE,
        )
    return _in_region(module, capture, declared, dtype) if low else module


def dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of a node's value if it is one tensor, else None."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _is_region(node: Node) -> bool:
    return node.target in (_HOP.wrap_with_autocast, _HOP.wrap_with_set_grad_enabled) or is_ours(
        node.target
    )


def _forget_dtypes(module: GraphModule) -> None:
    """Remove assertions on the dtypes of the capture."""
    for part in graphs_in(module):
        for node in list(part.graph.nodes):
            if node.target is aten._assert_tensor_metadata.default:
                part.graph.erase_node(node)
        part.recompile()


class _DtypeUpdater(Interpreter):
    """Interpreter that runs a graph on fake tensors and updates the dtypes of its nodes. Shapes
    keep their spelling.
    """

    def __init__(self, module: GraphModule, where: str) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._where = where

    def run_under(self, dtype: torch.dtype | None) -> None:
        """Run the graph on the values of its own placeholders, under autocast to `dtype`, or
        without autocast if None.
        """
        values = [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]
        mode: Any = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
        with mode, torch.no_grad(), _autocast(dtype or torch.bfloat16, enabled=dtype is not None):
            self.run(*values)

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
        except JobError:
            raise
        except Exception as error:  # torch's operators may raise anything for unsupported dtypes
            raise JobError(
                "an operator does not accept the dtypes that it would receive:"
                f" {first_line(error)}",
                where=self._where,
                got=f"{n.target} at {place_of_node(n)}",
                hint=_REFREEZE,
            ) from error
        if n.op != "output":
            n.meta["val"] = _retype(n.meta.get("val"), value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _HOP.wrap_with_autocast:
            _, dtype, enabled, _, body, *operands = args
            with _autocast(dtype, enabled=bool(enabled)):
                return self._nested(body, operands)
        if target is _HOP.wrap_with_set_grad_enabled:
            enabled, body, *operands = args
            with torch.set_grad_enabled(enabled):
                return self._nested(body, operands)
        if is_ours(target):
            return evaluate(target, args, self._nested)
        return super().call_function(target, args, kwargs)

    def _nested(self, body: GraphModule, operands: Sequence[Any]) -> Any:
        return _DtypeUpdater(body, self._where).run(*operands)


def _retype(before: Any, now: Any) -> Any:
    """Return a node's earlier value with its present dtype."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before if before.dtype is now.dtype else torch.empty_like(before, dtype=now.dtype)
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        return type(before)(_retype(b, n) for b, n in zip(before, now, strict=True))
    return before


def _autocast(dtype: torch.dtype, *, enabled: bool) -> torch.autocast:
    """Return an autocast region as captured graphs run them: on any device, without a cache."""
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=False)


def _results(module: GraphModule) -> list[Node]:
    """Return the nodes that a graph returns."""
    return list(next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0])


def _in_region(
    body: GraphModule,
    capture: GraphCapture,
    declared: Sequence[torch.dtype | None],
    dtype: torch.dtype,
) -> GraphModule:
    """Return a graph with the same inputs and outputs that calls `body` under autocast. Outputs for
    other graphs keep their dtypes.
    """
    outer = GraphModule(torch.nn.Module(), Graph())
    outer.add_module(_BODY, body)
    graph = outer.graph
    operands = []
    for node in body.graph.nodes:
        if node.op == "placeholder":
            operands.append(graph.placeholder(node.name))
            operands[-1].meta = dict(node.meta)
    region = graph.call_function(
        _HOP.wrap_with_autocast, ("cpu", dtype, True, False, graph.get_attr(_BODY), *operands)
    )
    results = _results(body)
    region.meta["val"] = tuple(node.meta["val"] for node in results)
    outputs = []
    for number, (node, spec, was) in enumerate(
        zip(results, capture.outputs, declared, strict=True)
    ):
        value = node.meta["val"]
        output = graph.call_function(operator.getitem, (region, number))
        output.meta["val"] = value
        if spec.role is OutputRole.OUTPUT and value.dtype is not was:
            output = graph.call_function(aten.to.dtype, (output, was))
            with value.fake_mode:
                output.meta["val"] = torch.empty_like(value, dtype=was)
        outputs.append(output)
    graph.output(tuple(outputs))
    outer.recompile()
    return outer
