"""Captured graphs in torch's own operators only, for one device, so that plain torch runs them
without this project installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from trainload.autograd_trace.derivation.decompose import spelled
from trainload.autograd_trace.derivation.interpret import GraphInterpreter
from trainload.autograd_trace.derivation.step_module import batch_symbol, placeholders
from trainload.autograd_trace.randomness.draws import RANDOM
from trainload.capture.operators import calls_in, graphs_in, is_overload, is_seeded, nodes_in
from trainload.capture.program import GraphCapture
from trainload.capture.substitutes import gamma  # noqa: F401 - registers operators named below
from trainload.capture.watching.higher_order import differentiates, is_ours
from trainload.core.errors import PackageError, first_line

_HOP: Any = torch.ops.higher_order
_NAMESPACE = "trainload"
_OURS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.trainload.dirichlet.default: torch.ops.aten._sample_dirichlet.default,
    torch.ops.trainload.dirichlet_at.default: lambda _, x: x.clone(),
    torch.ops.trainload.gamma_at.default: lambda _, x: x.clone(),
}
"""Operators that this project registers -> an equivalent for graphs that take no gradient of
them.
"""
_CAUSE = "it calls operators that plain torch does not have"


def own_operators(module: GraphModule) -> tuple[str, ...]:
    """Return the operators that a graph calls and that torch lacks without this project, sorted."""
    targets = (node.target for node in nodes_in(module) if node.op == "call_function")
    return tuple(
        sorted(
            {
                spelled(t)
                for t in targets
                if is_ours(t) or (is_overload(t) and t.namespace == _NAMESPACE)
            }
        )
    )


def other_devices(module: GraphModule, device: torch.device) -> bool:
    """Return True if a graph names, or was captured on, a device other than this one (and the meta
    device).
    """
    return any(
        device_type != device.type
        for node in nodes_in(module)
        for device_type in _devices_of(node)
        if device_type != "meta"
    )


def _devices_of(node: Node) -> set[str]:
    value = node.meta.get("val")
    device_types = {
        v.device.type
        for v in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(v, Tensor)
    }
    device_types |= {
        a.type for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.device)
    }
    if node.target is _HOP.wrap_with_autocast:
        device_types.add(str(node.args[0]))
    return device_types


def plain_graph(capture: GraphCapture, device: torch.device) -> GraphModule:
    """Return a captured graph for evaluation or prediction in torch's own operators, on a device,
    with the same placeholder names.

    Grad-mode regions are inlined, since nobody differentiates the result. A graph that has only
    torch's operators and was captured for that device stays as it is otherwise. Any other graph is
    traced again below autograd: autocast regions become conversions, gradients become the operators
    that compute them, and attention becomes the device's kernels.

    Raises:
        PackageError: an operator of this project remains; the message names it and the graph.
    """
    module = capture.exported.graph_module
    project_operators = own_operators(module)
    if (
        not project_operators
        and not other_devices(module, device)
        and not _writes_in_autocast(module)
    ):
        return _without_grad_modes(module)
    where = f"graph {capture.name}"
    try:
        traced = _trace_again(capture, device)
    except Exception as error:  # torch's tracer may raise anything
        cause = (
            _CAUSE
            if project_operators
            else "it is for another device, or has regions that torch cannot save"
        )
        raise PackageError(
            f"{cause}, and cannot be traced again: {first_line(error)}",
            where=where,
            got=", ".join(project_operators),
        ) from error
    remaining = own_operators(traced)
    if remaining:
        raise PackageError(
            _CAUSE,
            where=where,
            got=", ".join(remaining),
            hint="Export a graph without them: --graph.",
        )
    return traced


def _writes_in_autocast(module: GraphModule) -> bool:
    """Return True if an autocast region returns nothing and only writes to buffers.

    torch.export saves such a region but cannot load it.
    """
    values = [
        node.meta.get("val") for node in calls_in(module) if node.target is _HOP.wrap_with_autocast
    ]
    return any(value is None or (isinstance(value, list | tuple) and not value) for value in values)


def _without_grad_modes(module: GraphModule) -> GraphModule:
    """Return a copy with the bodies of grad-mode regions inlined.

    torch.export saves a grad-mode region that returns nothing, but cannot load it.
    """
    inlined = copy.deepcopy(module)
    for part in list(graphs_in(inlined)):
        while calls := [
            node for node in part.graph.nodes if node.target is _HOP.wrap_with_set_grad_enabled
        ]:
            for node in calls:
                _inline(part, node)
        part.graph.lint()
        part.recompile()
    return inlined


def _inline(part: GraphModule, node: Node) -> None:
    """Replace a grad-mode region by its body."""
    _, attribute, *operands = node.args
    assert isinstance(attribute, Node)
    body = part.get_submodule(str(attribute.target))
    assert isinstance(body, GraphModule)
    mapping: dict[Node, Any] = dict(
        zip((n for n in body.graph.nodes if n.op == "placeholder"), operands, strict=True)
    )
    results: Any = ()
    with part.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "output":
                results = map_arg(inner.args[0], mapping.__getitem__)
            elif inner.op == "get_attr":
                name = _free_name(part, str(inner.target))
                setattr(part, name, getattr(body, str(inner.target)))
                mapping[inner] = part.graph.get_attr(name)
                mapping[inner].meta = dict(inner.meta)
            elif inner.op != "placeholder":
                mapping[inner] = part.graph.node_copy(inner, mapping.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        part.graph.erase_node(user)
    part.graph.erase_node(node)
    if not attribute.users:
        part.graph.erase_node(attribute)
        delattr(part, str(attribute.target))


def _free_name(part: GraphModule, name: str) -> str:
    while hasattr(part, name):
        name += "_"
    return name


def _trace_again(capture: GraphCapture, device: torch.device) -> GraphModule:
    nodes = placeholders(capture)
    mode = next(n.meta["val"].fake_mode for n in nodes if isinstance(n.meta.get("val"), Tensor))
    interpreter = _PlainInterpreter(
        capture.exported.graph_module, None, device, batch_symbol(capture)
    )

    def run(*values: Tensor) -> Any:
        return interpreter.run(*values)

    gradients = (
        torch.enable_grad() if differentiates(capture.exported.graph_module) else torch.no_grad()
    )
    trained = {name for name, value in capture.exported.state_dict.items() if value.requires_grad}
    with mode, gradients:
        examples = [
            torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device=device)
            for n in nodes
        ]
        for value, spec in zip(examples, capture.exported.graph_signature.input_specs, strict=True):
            # a graph that computes gradients may do so through parameters
            value.requires_grad_(spec.target in trained)
        traced: GraphModule = make_fx(run, tracing_mode="real")(*examples)
    return _with_names(traced, nodes)


def _with_names(traced: GraphModule, names: list[Node]) -> GraphModule:
    """Return the traced graph with the placeholder names of the old one, and its results as a tuple
    without gradients.
    """
    graph = Graph()
    mapping: dict[Node, Node] = {}
    old = iter(names)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            before = next(old)
            placeholder = graph.placeholder(str(before.target))
            placeholder.name = before.name
            placeholder.meta = {"val": node.meta["val"]}
            mapping[node] = placeholder
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], list | tuple) else (node.args[0],)
            graph.output(tuple(mapping[value] for value in results))
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    renamed = GraphModule(traced, graph)
    renamed.graph.lint()
    return renamed


class _PlainInterpreter(GraphInterpreter):
    """Interpreter that runs a captured graph on a device with torch's own random operators."""

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _OURS:
            return _OURS[target](*args, **kwargs)
        if target in RANDOM or is_seeded(target):
            moved = (
                tuple(self._retarget(a) for a in args),
                {k: self._retarget(v) for k, v in kwargs.items()},
            )
            return Interpreter.call_function(self, target, *moved)
        return super()._call(target, args, kwargs)


def custom_libraries(
    module: GraphModule, libraries: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Return the namespaces of other libraries' operators that a graph calls -> the distribution
    that provides them.

    Args:
        module: the graph.
        libraries: namespace -> the distribution that provides it, or None if unknown.
    """
    namespaces = {
        node.target.namespace
        for part in graphs_in(module)
        for node in part.graph.nodes
        if is_overload(node.target)
    }
    return {name: libraries[name] for name in sorted(namespaces & set(libraries))}
