"""Turns the marks set while tracing into regions.

A region is an operator that holds the enclosed computation as a graph of its own.

torch.export makes such regions too, for grad mode and autocast, but loses some: it does not
recognise a region whose first node is anything but the change of mode (a control-flow body,
autocast inside no_grad). So its regions are dissolved first, and all of them are rebuilt from the
marks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from trainload.capture.watching import higher_order, marks
from trainload.capture.watching.mark_placement import (
    forget_conversions,
    place_hooks,
    place_variables,
    source_of,
)
from trainload.capture.watching.region_tree import (
    DEFERRED,
    Region,
    check_no_writes,
    forget_idle_copies,
    operands_of,
    parse_regions,
)
from trainload.capture.watching.torch_regions import (
    copied,
    dissolve,
    forget_switches,
    has_marks,
    place_bodies,
)

_HOP = torch.ops.higher_order


def make_regions(exported: ExportedProgram, grad_enabled: bool) -> None:
    """Replace an exported program's marks by regions, in place.

    Args:
        exported: result of torch.export.
        grad_enabled: the grad mode in which it was traced.

    Raises:
        CaptureError: if a region is used in a way that a graph cannot express.
    """
    root = exported.graph_module
    _make(root, grad_enabled)
    output = next(n for n in root.graph.nodes if n.op == "output")
    for spec, value in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        if isinstance(value, Node):
            spec.arg.name = value.name


def _make(module: GraphModule, grad_enabled: bool) -> None:
    marked = has_marks(module)
    if marked:
        dissolve(module)
        forget_switches(module.graph)
        _forget_unused(module)
    for child in module.children():
        if isinstance(child, GraphModule):
            _make(child, grad_enabled)
    if not marked:
        return
    place_bodies(module.graph)
    forget_conversions(module.graph)
    place_hooks(module.graph)
    place_variables(module.graph)
    module.graph = _Builder(module, parse_regions(module.graph, grad_enabled)).graph
    _forget_unused(module)
    module.recompile()


def _forget_unused(module: GraphModule) -> None:
    """Remove the bodies that a graph no longer uses."""
    used = {str(node.target).split(".")[0] for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_children() if name not in used]:
        delattr(module, name)


class _Builder:
    """Builds the graph that has regions as operators."""

    def __init__(self, module: GraphModule, root: Region) -> None:
        self.module = module
        self.number = 0
        self.deferred: dict[int, Region] = {}
        """Number -> region, for regions that do not run at their position in the graph."""
        self.graph = Graph()
        self._fill(self.graph, module, root, {})

    def _fill(
        self, graph: Graph, owner: GraphModule, region: Region, mapping: dict[Node, Node]
    ) -> None:
        """Add a region's items to the graph of `owner`.

        mapping: old node -> new node.
        """
        for item in region.items:
            if isinstance(item, Region):
                if item.kind in DEFERRED:
                    self.deferred[item.number] = item
                elif item.items:
                    self._region(graph, owner, item, mapping)
                continue
            args: Any = item.args  # signatures: see marks.py
            if item.target is marks.TANGENT:
                continue
            if item.target is marks.CONNECT:
                outputs, inputs, gradients, number = args
                tangents = {
                    n.args[0]: n
                    for n in item.graph.nodes
                    if n.target is marks.TANGENT and n.args[1] == number
                }
                body, operands = self._body(
                    self.deferred.pop(number), [tangents[o] for o in outputs], gradients
                )
                call = self._call(
                    graph,
                    owner,
                    higher_order.BACKWARD,
                    (body, len(outputs), len(inputs)),
                    [*outputs, *inputs, *operands],
                    mapping,
                )
            elif item.target is marks.CONNECT_USED:
                outputs, inputs, _, used, computed, _ = args
                bodies, operands = self._bodies_by_use(item)
                options = (len(outputs), len(inputs), tuple(used), tuple(computed), *bodies)
                call = self._call(
                    graph,
                    owner,
                    higher_order.BACKWARD_BY_USE,
                    options,
                    [*outputs, *inputs, *operands],
                    mapping,
                )
            elif item.target is marks.FUNC_GRAD:
                variables, results, number = args
                body, operands = self._body(self.deferred.pop(number), variables, results)
                sources = [source_of(v) for v in variables]
                call = self._call(
                    graph,
                    owner,
                    higher_order.FUNC_GRAD,
                    (body, len(variables)),
                    [*sources, *operands],
                    mapping,
                )
            elif item.target is marks.STACKED:
                results, dims, _, _, number = args
                region = self.deferred.pop(number)
                rows = [n for n in region.nodes() if n.target is marks.ROW and n.args[2] == number]
                body, operands = self._body(region, rows, results)
                in_dims = tuple(n.args[1] for n in rows) + (-1,) * len(operands)
                arguments = (body, in_dims, tuple(dims), region.text)
                call = self._call(
                    graph,
                    owner,
                    higher_order.VMAP,
                    arguments,
                    [*(source_of(n) for n in rows), *operands],
                    mapping,
                )
            elif item.target is marks.BRANCHES:
                pred, one, other, *numbers = args
                regions = [self.deferred.pop(number) for number in numbers]
                for region in regions:
                    check_no_writes(region)
                    forget_idle_copies(region)
                parts = [
                    (region, (), results)
                    for region, results in zip(regions, (one, other), strict=True)
                ]
                operands = list(
                    dict.fromkeys(operand for part in parts for operand in operands_of(*part))
                )
                bodies = [self._body(*part, operands)[0] for part in parts]
                call = self._call(graph, owner, _HOP.cond, (mapping[pred], *bodies), [], mapping)
                call.args = (*call.args, tuple(mapping[operand] for operand in operands))
            elif item.target is marks.AUTOGRAD_GRAD:
                outputs, inputs, gradients, create_graph = args
                options = (len(outputs), len(inputs), create_graph)
                call = self._call(
                    graph,
                    owner,
                    higher_order.AUTOGRAD_GRAD,
                    options,
                    [*outputs, *inputs, *gradients],
                    mapping,
                )
            else:
                mapping[item] = copied(item, graph, mapping.__getitem__, self.module, owner)
                continue
            call.meta = {**item.meta, "val": tuple(item.meta["val"])}
            mapping[item] = call

    def _bodies_by_use(self, call: Node) -> tuple[list[GraphModule], list[Node]]:
        """Return the bodies of a CONNECT_USED and their common operands.

        Bodies differ only in the gradients that arrive.
        """
        outputs, _, gradients, used, computed, numbers = cast(Any, call.args)
        regions = [self.deferred.pop(number) for number in numbers]
        tangents = {
            (n.args[1], n.args[0]): n for n in call.graph.nodes if n.target is marks.TANGENT
        }
        entries = [
            [tangents[k, o] for i, o in enumerate(outputs) if bits >> i & 1]
            for k, bits in zip(numbers, used, strict=True)
        ]
        left = iter(gradients)
        results = [list(itertools.islice(left, bits.bit_count())) for bits in computed]
        parts = list(zip(regions, entries, results, strict=True))
        operands = list(dict.fromkeys(operand for part in parts for operand in operands_of(*part)))
        return [self._body(*part, operands)[0] for part in parts], operands

    def _region(
        self, graph: Graph, owner: GraphModule, region: Region, mapping: dict[Node, Node]
    ) -> None:
        """Add a region that runs at its position in the graph."""
        inside = set(region.nodes())
        # Without results a region is kept as well: it may update a buffer.
        results = [n for n in region.nodes() if any(user not in inside for user in n.users)]
        arguments: tuple[Any, ...]
        body, operands = self._body(region, [], results)
        if region.kind == "grad_mode":
            target, arguments = _HOP.wrap_with_set_grad_enabled, (region.enabled, body)
        elif region.kind == "autocast":
            device, dtype, enabled = region.text.split(" ")
            target, arguments = (
                _HOP.wrap_with_autocast,
                (device, getattr(torch, dtype), enabled == "True", False, body),
            )
        else:
            target, arguments = (
                (higher_order.SELECTIVE, (body, region.text))
                if region.text
                else (higher_order.CHECKPOINT, (body,))
            )
        call = self._call(graph, owner, target, arguments, operands, mapping)
        call.meta = {"val": tuple(r.meta["val"] for r in results)}
        stacks = [r.meta["nn_module_stack"] for r in results if "nn_module_stack" in r.meta]
        if stacks:
            call.meta["nn_module_stack"] = stacks[0]
        for place, result in enumerate(results):
            mapping[result] = graph.call_function(operator.getitem, (call, place))
            mapping[result].meta = dict(result.meta)

    def _body(
        self,
        region: Region,
        entries: Sequence[Node],
        results: Sequence[Node],
        operands: list[Node] | None = None,
    ) -> tuple[GraphModule, list[Node]]:
        """Return a region as a graph of its own, and its operands.

        The graph's inputs are `entries`, then the operands: the outer values that it uses, or
        `operands` if given.
        """
        if operands is None:
            operands = operands_of(region, entries, results)
        body = GraphModule(torch.nn.Module(), Graph())
        inner: dict[Node, Node] = {}
        for source in (*entries, *operands):
            inner[source] = body.graph.placeholder(source.name)
            inner[source].meta = {"val": source.meta["val"]}
        self._fill(body.graph, body, region, inner)
        body.graph.output(tuple(inner[r] for r in results))
        body.recompile()
        return body, operands

    def _call(
        self,
        graph: Graph,
        owner: GraphModule,
        target: Any,
        arguments: Sequence[Any],
        operands: Sequence[Node],
        mapping: dict[Node, Node],
    ) -> Node:
        """Add a call of a region's operator; bodies become attributes of `owner`."""
        leading: list[Any] = []
        for argument in arguments:
            if isinstance(argument, GraphModule):
                name = f"region_{self.number}"
                self.number += 1
                setattr(owner, name, argument)
                argument = graph.get_attr(name)
            leading.append(argument)
        return graph.call_function(target, (*leading, *(mapping[o] for o in operands)))
