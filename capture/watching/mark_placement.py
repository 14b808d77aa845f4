"""Move marked values and regions to where they take effect, before regions are made of them."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching import higher_order, marks
from trainload.capture.watching.region_tree import DEFERRED
from trainload.core.errors import CaptureError

_aten = torch.ops.aten
_CONVERSIONS = (
    _aten.to.dtype,
    _aten.to.device,
    _aten.to.other,
    _aten.to.dtype_layout,
    _aten.type_as.default,
    _aten.contiguous.default,
)


def _forget_removed(graph: Graph) -> None:
    """Remove the hooks that forward itself removes again.

    Raises:
        CaptureError: if forward takes a gradient in between, on which the hook acts.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    hooks = {n.args[2]: n for n in graph.nodes if n.target is marks.HOOK}
    for removal in [n for n in graph.nodes if n.target is marks.UNHOOK]:
        hook = hooks.pop(removal.args[0], None)
        if hook is not None:
            if any(
                n.target is marks.AUTOGRAD_GRAD and order[hook] < order[n] < order[removal]
                for n in graph.nodes
            ):
                raise CaptureError(
                    "a tensor hook is removed after a gradient was taken through it",
                    where=place_of_node(removal),
                    hint=(
                        "Register it on a copy of the tensor (x.view_as(x)) that only this gradient"
                        " passes through."
                    ),
                )
            graph.erase_node(hook)
        graph.erase_node(removal)


def forget_conversions(graph: Graph) -> None:
    """Remove conversions that change nothing from deferred regions.

    Deferred regions do not run at their position in the graph.

    Such a conversion (`x.to(x.dtype)`) returns x itself, so the tracer attributes later uses of x
    to the conversion. In a hook or a backward that would tie forward to the region ("KeyError:
    to_2" for torch.amp's `custom_bwd`).
    """
    for begin in [n for n in graph.nodes if n.target is marks.BEGIN and n.args[0] in DEFERRED]:
        for node in _between(graph, begin.args[2]):
            if node.target in _CONVERSIONS and _changes_nothing(node):
                node.replace_all_uses_with(source_of(node))
                graph.erase_node(node)


def _changes_nothing(node: Node) -> bool:
    source, result = source_of(node).meta["val"], node.meta["val"]
    named = {
        a.name: value
        for a, value in zip(cast(Any, node.target)._schema.arguments, node.args, strict=False)
    } | node.kwargs
    if named.get("copy") or source.dtype != result.dtype or source.device != result.device:
        return False
    return bool(source.stride() == result.stride())


def place_hooks(graph: Graph) -> None:
    """Connect a hooked value to its hook right where it is computed.

    All of its uses then pass through the hook.

    The hook that was registered first sees a gradient first, so the value passes through it last.
    """
    _forget_removed(graph)
    for hook in [n for n in reversed(graph.nodes) if n.target is marks.HOOK]:
        value, gradient, number = hook.args
        region = _between(graph, number)
        place = _last_placeholder(graph) if value.op == "placeholder" else value
        order = {node: i for i, node in enumerate(graph.nodes)}
        tangents = [n for n in graph.nodes if n.target is marks.TANGENT and n.args[1] == number]
        moved = [*tangents, *region]
        late = [
            n
            for m in region
            for n in m.all_input_nodes
            if n not in moved and order[n] > order[place] and n.op != "get_attr"
        ]
        if late:
            raise CaptureError(
                "a tensor hook uses a value that is computed after the tensor that it is"
                " registered on",
                where=place_of_node(hook),
                hint="Use an autograd function whose backward does what the hook does.",
            )
        for node in moved:
            place.append(node)
            place = node
        with graph.inserting_after(place):
            connected = graph.call_function(marks.CONNECT, ([value], [value], [gradient], number))
        connected.meta["val"] = [value.meta["val"]]
        with graph.inserting_after(connected):
            passed = graph.call_function(operator.getitem, (connected, 0))
        passed.meta = dict(value.meta)
        value.replace_all_uses_with(passed, lambda user, own=(*moved, connected): user not in own)
        graph.erase_node(hook)


def place_variables(graph: Graph) -> None:
    """Make the nodes after `require_grad(x)` use a variable in place of x."""
    for mark in [n for n in graph.nodes if n.target is marks.REQUIRE_GRAD]:
        (value,) = mark.args
        with graph.inserting_after(mark):
            call = graph.call_function(higher_order.REQUIRE_GRAD, (value,))
        call.meta["val"] = (value.meta["val"],)
        with graph.inserting_after(call):
            variable = graph.call_function(operator.getitem, (call, 0))
        variable.meta = dict(value.meta)
        order = {node: i for i, node in enumerate(graph.nodes)}
        value.replace_all_uses_with(
            variable, lambda user, last=order[variable], order=order: order[user] > last
        )
        graph.erase_node(mark)


def _between(graph: Graph, number: int) -> list[Node]:
    """Return the nodes from a region's begin to its end, both included."""
    inside = False
    nodes = []
    for node in graph.nodes:
        inside = inside or (node.target is marks.BEGIN and node.args[2] == number)
        if inside:
            nodes.append(node)
        if node.target is marks.END and node.args[0] == number:
            return nodes
    raise AssertionError(f"region {number} is not closed")


def _last_placeholder(graph: Graph) -> Node:
    last: Node = [n for n in graph.nodes if n.op == "placeholder"][-1]
    return last


def source_of(node: Node) -> Node:
    """Return a node's first argument, the tensor that a mark represents."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source
