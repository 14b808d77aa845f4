"""Passes: functions that rewrite a captured graph, with a few built-in ones.

    trainload transform gpt.tl --pass trainload.passes:eliminate_dead_code -o new.tl

A pass works on the training IR, before autograd: the graph that torch.export traced, with no_grad
and autocast regions and the bodies of control flow as submodules. Every node has `meta["val"]` (a
fake tensor with the node's shape, dtype and device), and nodes of modules have
`meta["nn_module_stack"]`. See docs/guides/passes.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from trainload.autograd_trace.derivation import decompose as operator_set
from trainload.autograd_trace.randomness.draws import is_random
from trainload.capture.operators import (
    calls_in,
    graphs_in,
    is_higher_order,
    is_overload,
    written_by,
)
from trainload.capture.program import Program
from trainload.core.errors import JobError, PassError
from trainload.core.suggestions import did_you_mean
from trainload.core.user_code import functions_of, load_module

aten = torch.ops.aten

__all__ = [
    "GRAPH",
    "Pass",
    "decompose",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "gelu_tanh",
    "load_pass",
]

GRAPH = "trainload_graph"
"""Key of `graph.meta` with the graph's name: "train", "eval", "predict"."""


class Pass(Protocol):
    """A function that `trainload.transform` applies to graphs.

    It is called once for each captured graph of a package, with a copy that it may change and
    return; it may also return another graph. The inputs (placeholders, by name and order) and the
    number of outputs must stay the same. A new node without `meta["val"]` gets one.

    Its arguments are the graph, whose name is `graph.meta[GRAPH]`; the program, which has all
    graphs before the pass, the parameters and the state, and must not be changed; and the user's
    options: numbers, strings, booleans, tuples of strings.

    Example:
        def remove_dropout(graph, program):
            for node in graph.graph.find_nodes(
                op="call_function", target=torch.ops.aten.dropout.default
            ):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
            return graph

        trainload.transform(package, [remove_dropout], "new.tl", allow_change=True)
    """

    def __call__(
        self, graph: GraphModule, program: Program, *_: Any, **options: Any
    ) -> GraphModule: ...


def eliminate_dead_code(graph: GraphModule, program: Program) -> GraphModule:
    """Remove nodes on which no output and no buffer depends.

    Random operators stay, since later draws would change otherwise.
    """
    for part in graphs_in(graph):
        part.graph.eliminate_dead_code(is_impure_node=_has_effect)
    return graph


def eliminate_common_subexpressions(graph: GraphModule, program: Program) -> GraphModule:
    """Replace repeated computations of the same values by one.

    Random operators, regions and control flow are left unchanged, and so are nodes that return or
    read a tensor to which the graph writes in place.
    """
    for part in graphs_in(graph):
        written_nodes = _find_written(part)
        seen: dict[Any, Node] = {}
        for node in list(part.graph.nodes):
            if node.op != "call_function" or is_higher_order(node.target) or _has_effect(node):
                continue
            if node in written_nodes or not written_nodes.isdisjoint(node.all_input_nodes):
                continue
            key = (node.target, _hashable(node.args), _hashable(tuple(sorted(node.kwargs.items()))))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                part.graph.erase_node(node)
    return graph


def gelu_tanh(graph: GraphModule, program: Program) -> GraphModule:
    """Compute GELU by its tanh approximation, as in some published models.

    It changes values, so it must be allowed.
    """
    for node in calls_in(graph):
        if node.target is aten.gelu.default:
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    return graph


def decompose(
    graph: GraphModule, program: Program, *, operators: str | Sequence[str] = "core"
) -> GraphModule:
    """Decompose operators of a graph, as `trainload ops --set` does.

    Args:
        graph: see `Pass`.
        program: see `Pass`.
        operators: names of operators to decompose ("aten.linear.default"), or "core": every
            operator outside core ATen.
    """
    if operators == "core":
        return operator_set.decompose(graph, lambda target: not operator_set.is_core(target))
    names = frozenset([operators] if isinstance(operators, str) else operators)
    return operator_set.decompose(graph, lambda target: operator_set.spelled(target) in names)


def load_pass(spec: str) -> tuple[Pass, dict[str, Any]]:
    """Load the pass of a command line spec, with its options.

    A spec is `module:function` or `path/to/file.py:function`, followed by `,name=value` for each
    option. A value is parsed as JSON if possible (`3`, `0.5`, `true`), otherwise it is a string.

    Raises:
        PassError: the spec is malformed, its module does not import, or it is not a function.
    """
    reference, *options = spec.split(",")
    location, _, name = reference.rpartition(":")
    if (
        not location
        or not name.isidentifier()
        or not all(option.partition("=")[0].isidentifier() and "=" in option for option in options)
    ):
        raise PassError(
            "this does not name a pass",
            where=spec,
            expected="module:function or file.py:function[,name=value...]",
        )
    try:
        module = load_module(location)
    except JobError as error:
        raise PassError(error.problem, where=error.where) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise PassError(
            f"there is no function {name!r} in it",
            where=location,
            hint=did_you_mean(name, functions_of(module)),
        )
    return function, {
        key: _option(value) for key, _, value in (option.partition("=") for option in options)
    }


def _option(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | None) else text


def _has_effect(node: Node) -> bool:
    """Return True if a call, or the body of its region or control flow, has effects: writes, random
    draws or assertions.
    """
    if node.op in ("placeholder", "output"):
        return True
    if is_overload(node.target):
        schema = node.target._schema
        return schema.is_mutable or is_random(node) or not schema.returns or "assert" in schema.name
    owner = node.graph.owning_module
    bodies = (
        [getattr(owner, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"]
        if is_higher_order(node.target)
        else []
    )
    return any(
        _has_effect(call)
        for body in bodies
        if isinstance(body, GraphModule)
        for call in calls_in(body)
    )


def _find_written(part: GraphModule) -> set[Node]:
    """Return the nodes to whose memory the graph may write: arguments of operators that write, and
    the bases of views among them.
    """
    written: set[Node] = set()
    stack: list[Node] = []
    for node in part.graph.nodes:
        if is_higher_order(node.target) and _has_effect(node):
            stack += [source for source in node.all_input_nodes if source.op != "get_attr"]
        elif is_overload(node.target) and node.target._schema.is_mutable:
            stack += [*written_by(node), node]
    while stack:
        node = stack.pop()
        if node not in written:
            written.add(node)
            # a view's first argument is its base
            stack += node.all_input_nodes[:1] if node.op == "call_function" else []
    return written


def _hashable(value: Any) -> Any:
    """Return a key that distinguishes 1, 1.0 and True, and nodes by identity."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(entry) for entry in value)
    if isinstance(value, slice):
        return slice, _hashable((value.start, value.stop, value.step))
    return type(value), value
