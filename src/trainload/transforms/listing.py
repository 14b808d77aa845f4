"""Listing of a graph, one line for each node, with the source lines of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.derivation.decompose import spelled
from trainload.core.errors import PackageError
from trainload.core.suggestions import did_you_mean
from trainload.packaging.format.source_map import SourceMap, modules_of, named_nodes
from trainload.packaging.graphs.graph_signature import no_such_graph
from trainload.packaging.package import Package


@dataclass(frozen=True, slots=True)
class Line:
    """A node.

    `node` is its name in debug/; `file` and `line` are set if the source exists unchanged; `source`
    is its text.
    """

    node: str
    text: str
    module: str
    file: str | None
    line: int | None
    source: str


def module_lines(package: Package, graph: str, module: str) -> tuple[Line, ...]:
    """Return the nodes of a module and its submodules, in the graph's order.

    Args:
        package: the package.
        graph: name of the graph: "train", "eval", "critic-eval".
        module: path of the module, such as "layers.3"; "": the whole graph.

    Raises:
        PackageError: there is no such graph, or no node of such a module.
    """
    captures = package.program().graphs
    if graph not in captures:
        raise no_such_graph(graph, captures)
    sources = SourceMap(package.path)
    nodes = [
        (name, node)
        for name, node in named_nodes(captures[graph].exported.graph_module)
        if node.op == "call_function"
    ]
    lines = [_line(name, node, sources, graph) for name, node in nodes if module in _modules(node)]
    if not lines:
        modules = sorted(set().union(*(_modules(node) for _, node in nodes)) - {""})
        raise PackageError(
            "the graph has no node of this module",
            where=module,
            expected=", ".join(modules[:8]) + (", ..." if len(modules) > 8 else ""),
            hint=did_you_mean(module, modules),
        )
    return tuple(lines)


def _modules(node: Node) -> set[str]:
    """Return the module of a node and those that contain it; "" is always one of them."""
    return {"", *modules_of(node)}


def _line(name: str, node: Node, sources: SourceMap, graph: str) -> Line:
    place = sources.place(graph, name)
    modules = modules_of(node)
    is_unchanged = place is not None and place.unchanged
    return Line(
        node=name,
        text=listed_text(name, node),
        module=modules[-1] if modules else "",
        file=place.file if place is not None and is_unchanged else None,
        line=place.line if place is not None and is_unchanged else None,
        source=place.text if place is not None else "",
    )


def listed_text(name: str, node: Node) -> str:
    """Return a call as text: its name, dtype, shape with symbolic sizes, operator and arguments.

    Args:
        name: name of the node in debug/; nodes of bodies are indented.
        node: the node.
    """
    return (
        f"{'    ' * (name.count('/') // 2)}{node.name}{_shape(node)} ="
        f" {spelled(node.target)}({', '.join(_arguments(node))})"
    )


def _arguments(node: Node) -> Iterator[str]:
    yield from (_value(argument) for argument in node.args)
    yield from (f"{key}={_value(argument)}" for key, argument in node.kwargs.items())


def _value(argument: Any) -> str:
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_value, argument))}]"
    return str(argument).removeprefix("torch.")


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
