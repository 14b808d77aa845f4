"""The step graph for evaluation: the forward part of the one for training, where the model computes the same in both modes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from trainload.autograd_trace.aot import derive, draws
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.operators import is_higher_order
from trainload.capture.program import GraphCapture, Program

_HOP: Any = torch.ops.higher_order
_OF_TRAINING = (Role.SEED, Role.STEP, Role.ROW, Role.SCALE)


def derive_evaluation(program: Program, train: StepGraph, device: torch.device) -> StepGraph:
    """Derives the step graph of "eval" for a device: `derive(program, "eval", device)`, or the same from what there is already.

    Args:
        program: the captured program.
        train: its step graph "train" for the device.
        device: where the graph will run.

    Raises:
        CaptureError: as `derive`.
    """
    if draws(program.graphs["train"]) or not are_same(program.graphs["train"], program.graphs["eval"]):
        return derive(program, "eval", device)
    return _forward_of(train)


def are_same(first: GraphCapture, second: GraphCapture) -> bool:
    """Whether two captured graphs compute the same of the same inputs, operator by operator. Those with constants of their own never do."""

    def taken(capture: GraphCapture) -> list[tuple[InputKind, str | None]]:
        return [(spec.kind, spec.target) for spec in capture.exported.graph_signature.input_specs]

    return (
        (first.inputs, first.outputs, taken(first)) == (second.inputs, second.outputs, taken(second))
        and all(kind is not InputKind.CONSTANT_TENSOR for kind, _ in taken(first))
        and _equal(first.exported.graph_module, second.exported.graph_module)
    )


class _UnlikeError(Exception):
    """The graph holds what only `derive` can tell."""


def _equal(first: GraphModule, second: GraphModule) -> bool:
    try:
        return _calls(first) == _calls(second)
    except _UnlikeError:
        return False


def _calls(module: GraphModule) -> tuple[list[tuple[object, str]], str]:
    """What a graph calls, in order, and what it returns. Regions of a grad mode are entered: evaluation has none of its own."""
    calls: list[tuple[object, str]] = []

    def enter(part: GraphModule, operands: Sequence[Any]) -> Any:
        given = iter(operands)
        values: dict[Node, Any] = {}
        for node in part.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(part, str(node.target))
            elif node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            else:
                values[node] = call(node, map_arg((node.args, node.kwargs), values.__getitem__))
        raise AssertionError("a graph without output")

    def call(node: Node, arguments: Any) -> Any:
        args, kwargs = arguments
        if node.target is _HOP.wrap_with_set_grad_enabled:
            return enter(args[1], args[2:])
        if node.target is _HOP.wrap_with_autocast:
            calls.append((node.target, repr(args[:4])))
            result = enter(args[4], args[5:])
            calls.append((None, "end"))
            return result
        if node.target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        if is_higher_order(node.target) or any(isinstance(value, Tensor | GraphModule) for value in args):
            raise _UnlikeError
        calls.append((node.target, repr((args, kwargs))))
        return _Value(len(calls))

    inputs = [_Value(-1 - place) for place, node in enumerate(module.graph.nodes) if node.op == "placeholder"]
    return calls, repr(enter(module, inputs))


@dataclass(frozen=True, slots=True)
class _Value:
    """The result of a call, by its number; an input's is below 0."""

    number: int


def _forward_of(train: StepGraph) -> StepGraph:
    """A step without its gradients, for a graph that draws nothing."""
    source = train.module.graph
    results = next(node for node in reversed(source.nodes) if node.op == "output").args[0]
    kept = [(port, value) for port, value in zip(train.outputs, results, strict=True) if port.role is not Role.GRADIENT]
    needed: set[Node] = set()
    left = [value for _, value in kept]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    placeholders = dict(zip((node for node in source.nodes if node.op == "placeholder"), train.inputs, strict=True))
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in source.nodes:
        if placeholders[node].role not in _OF_TRAINING if node in placeholders else node in needed:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[value] for _, value in kept))
    inputs = tuple(port for port in train.inputs if port.role not in _OF_TRAINING)
    return StepGraph(module=GraphModule(train.module, graph), inputs=inputs, outputs=tuple(port for port, _ in kept))
