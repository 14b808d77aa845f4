"""The structure of a program.

Two programs of the same code share it if only sizes and repetitions of layers differ.

A graph is read as nested calls of modules. Each call is a list of events in order. An event is the
call of a module, or an operator: with the rank and dtype of its result, the sources of its
arguments (a parameter, an operator of a module), and those arguments that are not numbers or that
name dims. Numbers in module paths are left out (`layers.17` is `layers.*`), and if a sequence of
events that calls such a module occurs twice in a row, it is kept once. So three layers and eighty
have one structure if each of the eighty is like one of the three, in the same order of kinds. A
first layer is a kind of its own: its input comes from elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from trainload.capture.operators import bodies_of, is_overload
from trainload.capture.program import GraphCapture, Program

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NOT_SIZES = ("dim", "reduction")
"""Prefixes of the names of arguments whose integers are not sizes."""


def pattern(name: str) -> str:
    """Replace numeric parts of a dotted name: "layers.17.weight" -> "layers.*.weight"."""
    return _NUMBER.sub("*", name)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two structures: where, and what each program has there."""

    where: str
    abstract: str
    reduced: str


@dataclass(slots=True)
class _Call:
    """One call of a module; `events` are texts and calls."""

    path: str
    events: list[str | _Call] = field(default_factory=list)
    digest: str = ""

    @property
    def label(self) -> str:
        return f"{pattern(self.path)} {self.digest}"


def structure_of(program: Program) -> str:
    """Return the sha256 of a program's structure, in hex.

    It covers its graphs, and the names, ranks and dtypes of its state and inputs.
    """
    text = json.dumps(
        [
            _declarations(program),
            {name: _call_tree(graph).digest for name, graph in sorted(program.graphs.items())},
        ],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def difference(abstract: Program, reduced: Program) -> Difference | None:
    """Return the first difference between the structures of two programs, or None."""
    ours, theirs = _declarations(abstract), _declarations(reduced)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return Difference(name, ours.get(name, "none"), theirs.get(name, "none"))
    for name, graph in sorted(abstract.graphs.items()):
        mismatch = _first_difference(_call_tree(graph), _call_tree(reduced.graphs[name]))
        if mismatch is not None:
            return Difference(
                f"the {name} graph, {mismatch.where}", mismatch.abstract, mismatch.reduced
            )
    return None


def _declarations(program: Program) -> dict[str, str]:
    """Return a program's declarations other than its nodes, as subject -> text."""
    declarations: dict[str, set[str]] = {}
    for p in program.parameters:
        alias = "" if p.alias_of is None else f", tied to {pattern(p.alias_of)}"
        trained = "trained" if p.trainable else "not trained"
        declarations.setdefault(f"parameter {pattern(p.name)}", set()).add(
            f"{p.dtype} of {len(p.shape)} dims, {trained}{alias}"
        )
    for b in program.buffers:
        persistence = "persistent" if b.persistent else "not persistent"
        declarations.setdefault(f"buffer {pattern(b.name)}", set()).add(
            f"{b.dtype} of {len(b.shape)} dims, {persistence}"
        )
    for name, graph in program.graphs.items():
        declarations[f"graph {name}"] = {"captured"}
        for i in graph.inputs:
            dims = ", ".join("dynamic" if isinstance(size, str) else "fixed" for size in i.shape)
            declarations[f"input {i.name} of {name}"] = {f"{i.dtype} of dims [{dims}]"}
        declarations[f"outputs of {name}"] = {
            ", ".join(f"{o.role.value} {o.name}" for o in graph.outputs)
        }
    return {name: "; ".join(sorted(texts)) for name, texts in declarations.items()}


def _call_tree(graph: GraphCapture) -> _Call:
    """Return a graph as nested calls of modules, without repetitions."""
    root = _Call("")
    placeholders = [node for node in graph.exported.graph.nodes if node.op == "placeholder"]
    names = {
        node: f"input {node.name}"
        if spec.kind is InputKind.USER_INPUT
        else "constant"
        if spec.target is None
        else pattern(spec.target)
        for node, spec in zip(placeholders, graph.exported.graph_signature.input_specs, strict=True)
    }
    _add_calls(root, graph.exported.graph_module, names)
    _finish(root)
    return root


def _add_calls(root: _Call, module: GraphModule, names: dict[Node, str]) -> None:
    """Add a graph's calls to `root`.

    names: descriptions of its inputs; each visited node gets one: its module and its operator.
    """
    open_calls: list[tuple[str, _Call]] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names.setdefault(node, f"operand {len(names)}")
        if node.op != "call_function":
            continue
        stack = [
            (key, str(path))
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()
            if path and path != key
        ]
        same = 0
        while same < min(len(stack), len(open_calls)) and open_calls[same][0] == stack[same][0]:
            same += 1
        del open_calls[same:]
        for key, path in stack[same:]:
            # the model is a submodule of the traced module
            call = _Call(path.removeprefix("model").removeprefix("."))
            (open_calls[-1][1] if open_calls else root).events.append(call)
            open_calls.append((key, call))
        here = open_calls[-1][1] if open_calls else root
        here.events.extend(_node_events(node, module, names))
        names[node] = f"{pattern(here.path)}:{node.target}"


def _node_events(
    node: Node, module: GraphModule, names: Mapping[Node, str]
) -> Iterator[str | _Call]:
    """Yield an operator, then the graphs that it takes."""
    bodies = bodies_of(module, node)
    inputs = _inputs_of_body(node, bodies, names)
    schema = node.target._schema.arguments if is_overload(node.target) else ()
    parameter_names = [*(argument.name for argument in schema), *[""] * len(node.args)]
    named_arguments = [
        (a, name)
        for a, name in zip(node.args, parameter_names, strict=False)
        if inputs is None or not isinstance(a, Node)
    ]
    arguments = [_describe_argument(a, names, name) for a, name in named_arguments]
    arguments += [
        f"{name}={_describe_argument(a, names, name)}" for name, a in sorted(node.kwargs.items())
    ]
    yield f"{node.target}({', '.join(arguments)}) -> {_describe_value(node.meta.get('val'))}"
    for body in bodies.values():
        call = _Call(f"<a graph of {getattr(node.target, '__name__', node.target)}>")
        _add_calls(call, body, dict(inputs or {}))
        yield call


def _inputs_of_body(
    node: Node, bodies: Mapping[Node, GraphModule], names: Mapping[Node, str]
) -> dict[Node, str] | None:
    """Return descriptions of the inputs of an operator's graph, or None.

    Only for an operator that calls one graph once with its own operands: a region under autocast,
    or a checkpointed one. The number of its operands grows with the layers inside, so the places
    where they are used say more than their list.
    """
    if len(bodies) != 1:
        return None
    (body,) = bodies.values()
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    operands = [a for a in node.args if isinstance(a, Node) and a not in bodies]
    if len(operands) != len(placeholders):
        return None
    return {n: _describe_argument(a, names) for n, a in zip(placeholders, operands, strict=True)}


def _describe_argument(value: Any, names: Mapping[Node, str], parameter: str = "") -> str:
    """Return the source of an argument, or "number" if it may follow from sizes."""
    if parameter.startswith(_NOT_SIZES) and isinstance(value, int | list | tuple):
        return str(value)
    if isinstance(value, Node):
        return names.get(value, "a graph or a constant")
    if isinstance(value, list | tuple):
        return f"[{', '.join(sorted({_describe_argument(v, names) for v in value}))}]"
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(
        value, bool
    ):
        return "number"
    return str(value)


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of {value.ndim} dims"
    if isinstance(value, list | tuple):
        return f"({', '.join(_describe_value(v) for v in value)})"
    return "number" if value is not None else "nothing"


def _finish(call: _Call) -> None:
    """Remove repetitions, innermost calls first, and set the digests."""
    for event in call.events:
        if isinstance(event, _Call):
            _finish(event)
    call.events = _without_repetitions(call.events)
    labels = [event.label if isinstance(event, _Call) else event for event in call.events]
    call.digest = hashlib.sha256("\n".join(labels).encode()).hexdigest()


def _without_repetitions(events: list[str | _Call]) -> list[str | _Call]:
    """Return the events without repetitions.

    A sequence is left out if it repeats the one before it and calls a module with a number in its
    path.
    """
    labels = [event.label if isinstance(event, _Call) else event for event in events]
    numbered = [isinstance(event, _Call) and pattern(event.path) != event.path for event in events]
    indices = list(range(len(events)))
    length = 1
    while any(numbered) and length <= len(indices) // 2:
        shorter: list[int] = []
        for at in indices:
            shorter.append(at)
            last, before = shorter[-length:], shorter[-2 * length : -length]
            if (
                len(before) == length
                and labels[at] == labels[before[-1]]
                and any(numbered[i] for i in last)
                and all(labels[i] == labels[j] for i, j in zip(last, before, strict=True))
            ):
                del shorter[-length:]
        length = 1 if len(shorter) < len(indices) else length + 1
        indices = shorter
    return [events[i] for i in indices]


def _first_difference(ours: _Call, theirs: _Call) -> Difference | None:
    """Return the innermost difference between two calls."""
    if ours.digest == theirs.digest:
        return None
    for ours_event, theirs_event in zip(ours.events, theirs.events, strict=False):
        if (
            isinstance(ours_event, _Call)
            and isinstance(theirs_event, _Call)
            and pattern(ours_event.path) == pattern(theirs_event.path)
        ):
            mismatch = _first_difference(ours_event, theirs_event)
            if mismatch is not None:
                return mismatch
        elif (
            isinstance(ours_event, _Call)
            or isinstance(theirs_event, _Call)
            or ours_event != theirs_event
        ):
            return Difference(
                _describe_call(ours), _describe_event(ours_event), _describe_event(theirs_event)
            )
    rest = len(theirs.events), len(ours.events)
    longer = ours.events[rest[0]] if rest[0] < rest[1] else None
    missing = theirs.events[rest[1]] if rest[1] < rest[0] else None
    return Difference(_describe_call(ours), _describe_event(longer), _describe_event(missing))


def _describe_call(call: _Call) -> str:
    return f"module {pattern(call.path)}" if call.path else "the loss and the model itself"


def _describe_event(event: str | _Call | None) -> str:
    if event is None:
        return "nothing more"
    return f"a call of {pattern(event.path)}" if isinstance(event, _Call) else event


def parameter_count(program: Program) -> int:
    """Return the number of elements of all parameters; tied ones count once."""
    return sum(torch.Size(p.shape).numel() for p in program.parameters if p.alias_of is None)


def trainable_patterns(program: Program) -> Mapping[str, bool]:
    """Return pattern of a parameter's name -> True if such parameters are trained.

    Mixed patterns are left out.
    """
    flags: dict[str, set[bool]] = {}
    for p in program.parameters:
        flags.setdefault(pattern(p.name), set()).add(p.trainable)
    return {name: kinds.pop() for name, kinds in flags.items() if len(kinds) == 1}
