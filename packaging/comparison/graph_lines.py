"""Conversion of a graph file to comparable lines, one for each node, grouped by module.

A node's name in a file ("linear_3") changes when a node is inserted before it. So a line names a
value by its origin: a parameter, an input, or the n-th call of an operator within a module. torch
is not used: the graph is the JSON of a package's file.
"""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainload.packaging.format.source_map import module_path
from trainload.packaging.graphs.graph_signature import SCALAR_TYPES

_SYMBOL = re.compile(r"Symbol\('([a-z]+\d+)'[^)]*\)")


@dataclass(frozen=True, slots=True)
class Line:
    """One node, or one output: `text` is the call, `values` has its results' dtypes and sizes."""

    module: str
    text: str
    values: str


@dataclass(frozen=True, slots=True)
class GraphLines:
    """A graph's lines in order, and operator -> number of calls, bodies of control flow
    included.
    """

    lines: tuple[Line, ...]
    calls: Mapping[str, int]


def graph_lines(document: Mapping[str, Any], inputs: Sequence[str]) -> GraphLines:
    """Return the lines of a graph file.

    Args:
        document: a graph file that passed `validate_graph`.
        inputs: names for its user inputs, in order.
    """
    module = document["graph_module"]
    reader = _Reader()
    labels: dict[str, str] = {}
    names = iter(inputs)
    for number, spec in enumerate(module["signature"]["input_specs"]):
        ((kind, entry),) = spec.items()
        if kind == "user_input":
            labels[_first_name(entry["arg"])] = next(names, f"input {number}")
        else:
            labels[entry["arg"]["name"]] = (
                entry[f"{kind}_name"]
                if kind != "tensor_constant"
                else f"constant {entry[f'{kind}_name']}"
            )
    reader.nodes(module["graph"], labels, "", "")
    for spec in module["signature"]["output_specs"]:
        ((kind, entry),) = spec.items()
        target = entry.get("buffer_name") or entry.get("parameter_name") or ""
        argument_text = reader.argument(
            entry["arg"] if kind == "user_output" else {"as_tensor": entry["arg"]}, labels, ""
        )
        reader.lines.append(
            Line(
                "",
                " ".join(part for part in (kind.replace("_", " "), target, argument_text) if part),
                "",
            )
        )
    return GraphLines(tuple(reader.lines), dict(reader.calls))


class _Reader:
    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.calls: Counter[str] = Counter()
        self._seen: Counter[tuple[str, str]] = Counter()

    def nodes(
        self, graph: Mapping[str, Any], labels: dict[str, str], outer: str, indent: str
    ) -> None:
        """Add the lines of a graph or body.

        `labels` has its inputs' labels and receives those of its values; `outer` is its module.
        """
        for node in graph["nodes"]:
            stack = node["metadata"].get("nn_module_stack", "")
            module = module_path(stack) if stack else outer
            operator = node["target"].removeprefix("torch.ops.").removesuffix(".default")
            self.calls[operator] += 1
            self._seen[module, operator] += 1
            count = self._seen[module, operator]
            label = operator.rpartition("higher_order.")[2] + (f"#{count}" if count > 1 else "")
            bodies = [
                entry["arg"]["as_graph"] for entry in node["inputs"] if "as_graph" in entry["arg"]
            ]
            # own names depend on earlier bodies
            numbers = {body["name"]: f"body {number}" for number, body in enumerate(bodies, 1)}
            arguments = ", ".join(
                self._format_input(entry, ChainMap(numbers, labels) if bodies else labels, module)
                for entry in node["inputs"]
            )
            self.lines.append(
                Line(
                    module,
                    f"{indent}{operator}({arguments})",
                    self._format_values(node["outputs"], graph),
                )
            )
            for body in bodies:
                self._add_body(body, numbers[body["name"]], module, indent + "  ")
            values = [name for output in node["outputs"] for name in _value_names(output)]
            for number, name in enumerate(values):
                labels[name] = f"{module}:{label}" + (f"[{number}]" if len(values) > 1 else "")

    def _add_body(self, body: Mapping[str, Any], title: str, module: str, indent: str) -> None:
        graph = body["graph"]
        labels = {
            name: f"operand {number}"
            for number, entry in enumerate(graph["inputs"])
            for name in _value_names(entry)
        }
        self.lines.append(Line(module, f"{indent}{title}:", ""))
        self.nodes(graph, labels, module, indent)
        results = ", ".join(self.argument(entry, labels, module) for entry in graph["outputs"])
        self.lines.append(Line(module, f"{indent}gives {results}", ""))

    def _format_input(
        self, entry: Mapping[str, Any], labels: Mapping[str, str], module: str
    ) -> str:
        argument_text = self.argument(entry["arg"], labels, module)
        return (
            f"{entry['name']}={argument_text}"
            if entry["kind"] == 2 and entry["name"]
            else argument_text
        )

    def argument(self, value: Any, labels: Mapping[str, str], module: str) -> str:
        """Return an argument in readable form."""
        if isinstance(value, list):
            return f"[{', '.join(self.argument(entry, labels, module) for entry in value)}]"
        if not isinstance(value, dict):
            return repr(value)
        if set(value) == {"name"}:
            return _shorten_label(labels.get(value["name"], value["name"]), module)
        if set(value) == {"type", "index"}:
            return str(value["type"])
        if set(value) == {"real", "imag"}:
            return f"({value['real']}+{value['imag']}j)"
        ((kind, entry),) = value.items()
        if kind == "as_none":
            return "None"
        if kind == "as_name":
            return _shorten_label(labels.get(entry, entry), module)
        if kind == "as_scalar_type":
            return SCALAR_TYPES.get(entry, str(entry))
        if kind == "as_graph":
            return labels.get(entry["name"], str(entry["name"]))
        if kind == "as_layout":
            return "strided"  # the only layout in graphs
        if kind == "as_operator":
            return str(entry).removeprefix("torch.ops.").removesuffix(".default")
        return self.argument(entry, labels, module)

    def _format_values(self, outputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]) -> str:
        return ", ".join(
            _format_meta(name, graph) for output in outputs for name in _value_names(output)
        )


def _format_meta(name: str, graph: Mapping[str, Any]) -> str:
    meta = graph["tensor_values"].get(name)
    if meta is None:
        for table in ("sym_int_values", "sym_bool_values", "sym_float_values"):
            if name in graph[table]:
                return _format_size(graph[table][name])
        return ""
    device = "" if meta["device"]["type"] == "cpu" else f" {meta['device']['type']}"
    dtype = SCALAR_TYPES.get(meta["dtype"], meta["dtype"])
    return f"{dtype}[{', '.join(map(_format_size, meta['sizes']))}]{device}"


def _format_size(size: Mapping[str, Any]) -> str:
    ((_, value),) = size.items()
    return _SYMBOL.sub(r"\1", value["expr_str"]) if isinstance(value, dict) else str(value)


def _value_names(value: Any) -> list[str]:
    """Return the names of the values in an input, output or result."""
    if isinstance(value, list):
        return [name for entry in value for name in _value_names(entry)]
    if not isinstance(value, dict):
        return []
    return [
        name
        for key, entry in value.items()
        for name in ([entry] if key in ("name", "as_name") else _value_names(entry))
    ]


def _first_name(value: Any) -> str:
    return next(iter(_value_names(value)), "")


def _shorten_label(label: str, module: str) -> str:
    """Return a label as seen from a module: without the module's name if it is the same one."""
    return label.removeprefix(f"{module}:")
