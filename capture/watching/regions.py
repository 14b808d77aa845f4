"""Turns the marks set while tracing into regions.

A region is an operator that holds the enclosed computation as a graph of its own.

torch.export makes such regions too, for grad mode and autocast, but loses some: it does not
recognise a region whose first node is anything but the change of mode (a control-flow body,
autocast inside no_grad). So its regions are dissolved here, and all of them are rebuilt from the
marks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from trainload.capture.operators import base_of, written_by
from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching import higher_order, marks
from trainload.core.errors import CaptureError

_HOP = torch.ops.higher_order
_SWITCHES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled"})
_DISSOLVED = (_HOP.wrap_with_set_grad_enabled, _HOP.wrap_with_autocast)


@dataclass(eq=False)
class _Region:
    """A part of a graph.

    Attributes:
        kind: "grad_mode", or the kind of a `marks.BEGIN`.
        text: text of the `marks.BEGIN` or `marks.KEEP`.
        number: number of the `marks.BEGIN`.
        enabled: the grad mode, for a grad_mode region.
        items: nodes and nested regions, in order.
    """

    kind: str
    text: str = ""
    number: int = -1
    enabled: bool = True
    items: list[Node | _Region] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes in the region, including those of nested regions."""
        for item in self.items:
            if isinstance(item, _Region):
                yield from item.nodes()
            else:
                yield item


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
    marked = _has_marks(module)
    if marked:
        _dissolve(module)
        _forget_switches(module.graph)
        _forget_unused(module)
    for child in module.children():
        if isinstance(child, GraphModule):
            _make(child, grad_enabled)
    if not marked:
        return
    _place_bodies(module.graph)
    _forget_conversions(module.graph)
    _place_hooks(module.graph)
    _place_variables(module.graph)
    module.graph = _Builder(module, _parse(module.graph, grad_enabled)).graph
    _forget_unused(module)
    module.recompile()


def _place_bodies(graph: Graph) -> None:
    """Move control-flow bodies directly before the operators that take them.

    torch leaves them in an autocast region that came before.
    """
    for node in graph.find_nodes(op="get_attr"):
        users = list(node.users)
        for user in users[:1]:
            user.prepend(node)
        for user in users[1:]:
            with graph.inserting_before(user):
                own = graph.get_attr(str(node.target))
            own.meta = dict(node.meta)
            user.replace_input_with(node, own)


def _forget_switches(graph: Graph) -> None:
    """Remove torch's own mode changes.

    torch leaves them in the graph where it makes no region of them, for example where the bodies of
    cond come first.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _SWITCHES:
            graph.erase_node(node)


def _forget_unused(module: GraphModule) -> None:
    """Remove the bodies that a graph no longer uses."""
    used = {str(node.target).split(".")[0] for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_children() if name not in used]:
        delattr(module, name)


def _has_marks(module: GraphModule) -> bool:
    """Return True if there are marks in a graph or in torch's regions inside it."""
    bodies = (_body_of(module, node)[0] for node in module.graph.nodes if node.target in _DISSOLVED)
    return any(_is_mark(node) for node in module.graph.nodes) or any(
        _has_marks(body) for body in bodies
    )


def _body_of(module: GraphModule, call: Node) -> tuple[GraphModule, int]:
    """Return the body of a call of one of torch's regions, and its index among the arguments."""
    place, attribute = next(
        (i, a) for i, a in enumerate(call.args) if isinstance(a, Node) and a.op == "get_attr"
    )
    body = module.get_submodule(str(attribute.target))
    assert isinstance(body, GraphModule)
    return body, place


def _is_mark(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == marks.NAMESPACE


def _dissolve(module: GraphModule) -> None:
    """Inline the bodies of torch's regions where they are called.

    The graph is rebuilt: torch changed the targets of nodes of the old graph without updating its
    tables, so that they cannot be erased from it.
    """
    graph = Graph()
    mapping: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = graph.node_copy(node)
    graph.output(_inlined(module, mapping, graph, module))
    module.graph = graph


def _inlined(
    source: GraphModule, mapping: dict[Node, Any], graph: Graph, owner: GraphModule
) -> Any:
    """Copy a graph's nodes into the graph of `owner` and return its results.

    mapping: old node -> new node; contains the placeholders at first.
    """
    results: Any = None
    for node in source.graph.nodes:
        if node.op == "placeholder" or (
            node.op == "get_attr"
            and node.users
            and all(user.target in _DISSOLVED for user in node.users)
        ):
            continue
        if node.op == "output":
            results = torch.fx.map_arg(node.args[0], mapping.__getitem__)
        elif node.target in _DISSOLVED:
            body, place = _body_of(source, node)
            entries = [n for n in body.graph.nodes if n.op == "placeholder"]
            given = torch.fx.map_arg(node.args[place + 1 :], mapping.__getitem__)
            mapping[node] = _inlined(body, dict(zip(entries, given, strict=True)), graph, owner)
        elif node.target is operator.getitem and node.args[0].target in _DISSOLVED:
            mapping[node] = mapping[node.args[0]][node.args[1]]
        else:
            mapping[node] = _copied(node, graph, mapping.__getitem__, source, owner)
    return results


def _copied(
    node: Node,
    graph: Graph,
    mapped: Callable[[Node], Node],
    source: GraphModule,
    target: GraphModule,
) -> Node:
    """Copy a node into another graph, together with the attribute that it names."""
    copy = graph.node_copy(node, mapped)
    if node.op == "get_attr":
        value = getattr(source, str(node.target))
        name = str(node.target)
        while hasattr(target, name) and getattr(target, name) is not value:
            name += "_"
        setattr(target, name, value)
        copy.target = name
    return copy


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


_DEFERRED = ("backward", "func_grad", "vmap", "branch")
"""Kinds of regions that do not run at their position in the graph."""
_aten = torch.ops.aten
_CONVERSIONS = (
    _aten.to.dtype,
    _aten.to.device,
    _aten.to.other,
    _aten.to.dtype_layout,
    _aten.type_as.default,
    _aten.contiguous.default,
)


def _forget_conversions(graph: Graph) -> None:
    """Remove conversions that change nothing from deferred regions.

    Deferred regions do not run at their position in the graph.

    Such a conversion (`x.to(x.dtype)`) returns x itself, so the tracer attributes later uses of x
    to the conversion. In a hook or a backward that would tie forward to the region ("KeyError:
    to_2" for torch.amp's `custom_bwd`).
    """
    for begin in [n for n in graph.nodes if n.target is marks.BEGIN and n.args[0] in _DEFERRED]:
        for node in _between(graph, begin.args[2]):
            if node.target in _CONVERSIONS and _changes_nothing(node):
                node.replace_all_uses_with(_source(node))
                graph.erase_node(node)


def _changes_nothing(node: Node) -> bool:
    source, result = _source(node).meta["val"], node.meta["val"]
    named = {
        a.name: value
        for a, value in zip(cast(Any, node.target)._schema.arguments, node.args, strict=False)
    } | node.kwargs
    if named.get("copy") or source.dtype != result.dtype or source.device != result.device:
        return False
    return bool(source.stride() == result.stride())


def _place_hooks(graph: Graph) -> None:
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


def _place_variables(graph: Graph) -> None:
    """Make the nodes after `require_grad(x)` use a variable in place of x."""
    for mark in [n for n in graph.nodes if n.target is marks.REQUIRE_GRAD]:
        (value,) = mark.args
        with graph.inserting_after(mark):
            made = graph.call_function(higher_order.REQUIRE_GRAD, (value,))
        made.meta["val"] = (value.meta["val"],)
        with graph.inserting_after(made):
            variable = graph.call_function(operator.getitem, (made, 0))
        variable.meta = dict(value.meta)
        order = {node: i for i, node in enumerate(graph.nodes)}
        value.replace_all_uses_with(
            variable, lambda user, last=order[variable], order=order: order[user] > last
        )
        graph.erase_node(mark)


def _between(graph: Graph, number: int) -> list[Node]:
    """Return the nodes from a region's begin to its end, both included."""
    inside = False
    found = []
    for node in graph.nodes:
        inside = inside or (node.target is marks.BEGIN and node.args[2] == number)
        if inside:
            found.append(node)
        if node.target is marks.END and node.args[0] == number:
            return found
    raise AssertionError(f"region {number} is not closed")


def _last_placeholder(graph: Graph) -> Node:
    last: Node = [n for n in graph.nodes if n.op == "placeholder"][-1]
    return last


def _parse(graph: Graph, grad_enabled: bool) -> _Region:
    """Return the tree of a graph's regions.

    A backward runs in the grad mode of the code that differentiates (None here), except for modes
    that it sets itself.
    """
    root = _Region("root")
    stack = [root]
    modes: list[bool | None] = [grad_enabled]  # the grad mode around each region on the stack
    now: bool | None = grad_enabled
    # grad mode before a backward, and the contexts entered in it
    left: dict[int, tuple[bool | None, list[bool]]] = {}

    def close_mode() -> None:
        if stack[-1].kind == "grad_mode":
            stack.pop()
            modes.pop()

    def open_mode() -> None:
        if now is not None and now != modes[-1]:
            region = _Region("grad_mode", enabled=now)
            stack[-1].items.append(region)
            stack.append(region)
            modes.append(now)

    for node in graph.nodes:
        if node.target is marks.GRAD_MODE:
            close_mode()
            now = node.args[0]
            backward = next(
                (left[region.number] for region in reversed(stack) if region.number in left), None
            )
            if backward is not None:
                # An enable_grad in a backward is kept even if it changed nothing in the trace,
                # since the caller's grad mode is unknown.
                _, entered = backward
                if node.args[1] and entered:
                    entered.pop()
                else:
                    entered.append(node.args[0])
                now = entered[-1] if entered else None
            open_mode()
        elif node.target is marks.BEGIN:
            region = _Region(*node.args)
            stack[-1].items.append(region)
            stack.append(region)
            if region.kind == "backward":
                left[region.number] = (now, [])
                now = None
            modes.append(now)
        elif node.target is marks.KEEP:
            next(
                region for region in reversed(stack) if region.number == node.args[1]
            ).text = node.args[0]
        elif node.target is marks.END:
            # a grad mode, or regions left open by an exception
            while stack[-1].number != node.args[0]:
                stack.pop()
                modes.pop()
            ended = stack.pop()
            modes.pop()
            if ended.number in left:
                now, _ = left.pop(ended.number)
            if stack[-1].kind != "grad_mode" or stack[-1].enabled != now:
                close_mode()
                open_mode()
        elif node.op in ("placeholder", "output"):
            if node.op == "output":
                close_mode()
            root.items.append(node)
        else:
            stack[-1].items.append(node)
    assert stack == [root], "a region is not closed"
    return root


class _Builder:
    """Builds the graph that has regions as operators."""

    def __init__(self, module: GraphModule, root: _Region) -> None:
        self.module = module
        self.number = 0
        self.deferred: dict[int, _Region] = {}
        """Number -> region, for regions that do not run at their position in the graph."""
        self.graph = Graph()
        self._fill(self.graph, module, root, {})

    def _fill(
        self, graph: Graph, owner: GraphModule, region: _Region, mapping: dict[Node, Node]
    ) -> None:
        """Add a region's items to the graph of `owner`.

        mapping: old node -> new node.
        """
        for item in region.items:
            if isinstance(item, _Region):
                if item.kind in _DEFERRED:
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
                made = self._call(
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
                made = self._call(
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
                sources = [_source(v) for v in variables]
                made = self._call(
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
                made = self._call(
                    graph,
                    owner,
                    higher_order.VMAP,
                    arguments,
                    [*(_source(n) for n in rows), *operands],
                    mapping,
                )
            elif item.target is marks.BRANCHES:
                pred, one, other, *numbers = args
                regions = [self.deferred.pop(number) for number in numbers]
                for region in regions:
                    _check_no_writes(region)
                    _forget_idle_copies(region)
                parts = [
                    (region, (), results)
                    for region, results in zip(regions, (one, other), strict=True)
                ]
                operands = list(
                    dict.fromkeys(operand for part in parts for operand in _operands(*part))
                )
                bodies = [self._body(*part, operands)[0] for part in parts]
                made = self._call(graph, owner, _HOP.cond, (mapping[pred], *bodies), [], mapping)
                made.args = (*made.args, tuple(mapping[operand] for operand in operands))
            elif item.target is marks.AUTOGRAD_GRAD:
                outputs, inputs, gradients, create_graph = args
                options = (len(outputs), len(inputs), create_graph)
                made = self._call(
                    graph,
                    owner,
                    higher_order.AUTOGRAD_GRAD,
                    options,
                    [*outputs, *inputs, *gradients],
                    mapping,
                )
            else:
                mapping[item] = _copied(item, graph, mapping.__getitem__, self.module, owner)
                continue
            made.meta = {**item.meta, "val": tuple(item.meta["val"])}
            mapping[item] = made

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
        operands = list(dict.fromkeys(operand for part in parts for operand in _operands(*part)))
        return [self._body(*part, operands)[0] for part in parts], operands

    def _region(
        self, graph: Graph, owner: GraphModule, region: _Region, mapping: dict[Node, Node]
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
        region: _Region,
        entries: Sequence[Node],
        results: Sequence[Node],
        operands: list[Node] | None = None,
    ) -> tuple[GraphModule, list[Node]]:
        """Return a region as a graph of its own, and its operands.

        The graph's inputs are `entries`, then the operands: the outer values that it uses, or
        `operands` if given.
        """
        if operands is None:
            operands = _operands(region, entries, results)
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
        given: list[Any] = []
        for argument in arguments:
            if isinstance(argument, GraphModule):
                name = f"region_{self.number}"
                self.number += 1
                setattr(owner, name, argument)
                argument = graph.get_attr(name)
            given.append(argument)
        return graph.call_function(target, (*given, *(mapping[o] for o in operands)))


def _operands(region: _Region, entries: Sequence[Node], results: Sequence[Node]) -> list[Node]:
    """Return the outer values that a region uses, without `entries`.

    The entries are removed from the region.
    """
    region.items = [i for i in region.items if isinstance(i, _Region) or i not in entries]
    inside = set(region.nodes())
    used = [source for node in region.nodes() for source in node.all_input_nodes] + [
        r for r in results if r not in inside
    ]
    return list(dict.fromkeys(n for n in used if n not in inside and n not in entries))


def _forget_idle_copies(region: _Region) -> None:
    """Remove a branch's copies of buffers that it does not use."""
    for item in reversed(list(region.items)):
        if isinstance(item, _Region):
            _forget_idle_copies(item)
        elif (
            item.target in (_aten.clone.default, _aten.view.dtype, _aten.to.dtype)
            and not item.users
        ):
            region.items.remove(item)
            item.graph.erase_node(item)


def _check_no_writes(region: _Region) -> None:
    """Check that a branch writes only to tensors that it created.

    Raises:
        CaptureError: if it writes to another tensor; names the line of the write.
    """
    inside = set(region.nodes())
    for node in region.nodes():
        for target in written_by(node):
            if base_of(target) not in inside:
                raise CaptureError(
                    "a branch of torch.cond writes to a tensor that is not a buffer of the model",
                    where=place_of_node(node),
                    hint=(
                        "Return the new value from both branches, or keep it in a buffer"
                        " (register_buffer)."
                    ),
                )


def _source(node: Node) -> Node:
    """Return a node's first argument, the tensor that a mark represents."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source
