"""Conversion of graphs to JSON and back.

Run on torch 2.13.0. The private names are those of `torch._export.serde` (torch.export's own
schema, major version 8), `torch._ops`, and the constructor of ExportedProgram.
Nothing here reads pickles. Every document that is read must have passed `validate.validate_graph`.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import torch
from torch._export.serde import schema as serde
from torch._export.serde.serialize import (
    GraphModuleDeserializer,
    GraphModuleSerializer,
    SerializeError,
    _int_to_sympy_int,
    serialize_range_constraints,
)
from torch._export.serde.union import _Union
from torch._export.verifier import SpecViolationError, load_verifier
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from trainload.capture.operators import calls_in
from trainload.capture.source.quiet import quiet_torch
from trainload.capture.watching import higher_order  # noqa: F401 - registers operators of graphs
from trainload.core.errors import PackageError
from trainload.packaging.graphs.graph_fields import plain_treespec, strip_graph

DIALECT = "TRAINING"
"""Name of the dialect of IR that graphs are in, as torch's verifiers know it."""
_SYMBOL = re.compile(r"Symbol\('([a-z]+[0-9]+)'")
"""A symbol in a size, as in sympy's expressions."""
_POSITIONAL, _KEYWORD = serde.ArgumentKind.POSITIONAL.value, serde.ArgumentKind.KEYWORD.value
_REFUSALS = (
    SerializeError,
    SpecViolationError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    SyntaxError,
)
"""Exceptions of torch's reader and writer for a graph that they do not support."""


class GraphJson(NamedTuple):
    """A graph as JSON, and separately everything that names the machine, the folder and the
    source.
    """

    document: dict[str, Any]
    debug: dict[str, Any]


def graph_to_json(exported: ExportedProgram, where: str = "graph") -> GraphJson:
    """Serialise a training-IR graph, without weights, constants and example inputs.

    Law: the document depends only on the program, not on folder, process, hash seed or torch's
    patch version.

    Raises:
        PackageError: torch's schema cannot express the graph; the message names the node.
    """
    with refused(where), serialisable_values(exported.graph_module):
        exported.validate()  # type: ignore[no-untyped-call]
    return _to_json(
        exported.graph_module,
        exported.graph_signature,
        [entry for entry in exported.module_call_graph if entry.fqn == ""],
        # torch.export keeps a range for a derived dim (2*s0) too, although it follows from its
        # root's.
        {symbol: span for symbol, span in exported.range_constraints.items() if symbol.is_Symbol},
        list(exported._guards_code),
        where,
    )


def graph_from_json(
    document: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    where: str = "graph",
) -> ExportedProgram:
    """Rebuild a graph from a validated document.

    Args:
        document: a document of `graph_to_json` that passed `validate_graph`.
        state: a tensor (on any device, meta included) for every parameter and buffer that the graph
            reads. Names that share a tensor stay tied.
        constants: a tensor for every tensor constant.
        where: file name, for errors.

    Raises:
        PackageError: torch rejects the graph, or a tensor is missing.
    """
    module, signature, calls, symbols, ranges = _from_json(document, where)
    bound: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        target = str(spec.target)
        source = constants if spec.kind == InputKind.CONSTANT_TENSOR else state
        if target not in source:
            raise PackageError(
                f"the graph reads {target}, which the package does not contain", where=where
            )
        separate = spec.kind == InputKind.CONSTANT_TENSOR or (
            spec.kind == InputKind.BUFFER and not spec.persistent
        )
        (held if separate else bound)[target] = source[target]
    with refused(where):
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=signature,
            state_dict=bound,
            range_constraints={
                symbols[name]: span for name, span in ranges.items() if name in symbols
            },
            module_call_graph=calls,
            example_inputs=None,
            constants=held,
            verifiers=[load_verifier(DIALECT)],
        )


def flat_to_json(module: torch.fx.GraphModule, where: str = "graph") -> GraphJson:
    """Serialise a flat graph whose inputs and outputs are all plain values with `meta["val"]` (a
    step graph).

    Raises:
        PackageError: torch's schema cannot express the graph.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    output = next(node for node in module.graph.nodes if node.op == "output")
    inputs = [
        InputSpec(kind=InputKind.USER_INPUT, arg=argument_of(node), target=None)
        for node in placeholders
    ]
    outputs = [
        OutputSpec(kind=OutputKind.USER_OUTPUT, arg=argument_of(node), target=None)
        for node in output.args[0]
    ]
    return _to_json(module, ExportGraphSignature(inputs, outputs), [], _ranges(module), [], where)


def flat_from_json(document: Mapping[str, Any], where: str = "graph") -> torch.fx.GraphModule:
    """Rebuild a flat graph from a validated document: the inverse of `flat_to_json`.

    Every node has a `meta["val"]`, all of one FakeTensorMode.

    Raises:
        PackageError: torch rejects the graph.
    """
    return _from_json(document, where)[0]


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Convert torch's errors within the context into a PackageError: torch rejects the graph."""
    try:
        yield
    except PackageError:
        raise
    except _REFUSALS as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        head = f"{lines[0].strip()[:200]}: " if len(lines) > 1 else ""
        raise PackageError(
            f"torch {torch.__version__} rejects the graph: {head}{reason[:400]}", where=where
        ) from error


def argument_of(node: torch.fx.Node) -> TensorArgument | SymIntArgument:
    """Return the description of a node's value in a graph's signature."""
    return (
        TensorArgument(name=node.name)
        if isinstance(node.meta["val"], torch.Tensor)
        else SymIntArgument(name=node.name)
    )


def _ranges(module: torch.fx.GraphModule) -> dict[Any, Any]:
    ranges: dict[Any, Any] = {}
    for node in module.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, list | tuple) else (values,):
            if not isinstance(value, torch.Tensor | torch.SymInt):
                continue
            sizes = [value] if isinstance(value, torch.SymInt) else [*value.shape, *value.stride()]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    for symbol in free_symbols(size):
                        ranges.setdefault(symbol, size.node.shape_env.var_to_range[symbol])
    return ranges


def _to_json(
    module: torch.fx.GraphModule,
    signature: ExportGraphSignature,
    calls: Sequence[Any],
    ranges: Mapping[Any, Any],
    guards: list[str],
    where: str,
) -> GraphJson:
    with refused(where), serialisable_values(module), quiet_torch():
        serialised = GraphModuleSerializer(signature, list(calls)).serialize(module)
        document = _plain(
            {
                "graph_module": serialised,
                "range_constraints": serialize_range_constraints(dict(ranges)),
            }
        )
    graph_module = document["graph_module"]
    notes: dict[str, Any] = {}
    strip_graph(graph_module["graph"], "", notes, where)
    for entry in graph_module["module_call_graph"]:
        call = entry["signature"]
        call["inputs"], call["outputs"] = [], []
        call["in_spec"], call["out_spec"] = (
            plain_treespec(call["in_spec"]),
            plain_treespec(call["out_spec"]),
        )
    graph_parts = {key: graph_module[key] for key in ("graph", "signature", "module_call_graph")}
    debug = {
        "nodes": notes,
        "guards": guards,
        "torch": torch.__version__,
        "schema": list(serde.SCHEMA_VERSION),
    }
    # torch keeps ranges of symbols that it has replaced everywhere
    limits, used = document["range_constraints"], _symbols(graph_parts)
    return GraphJson(
        {
            "graph_module": graph_parts,
            "range_constraints": {name: limits[name] for name in limits if name in used},
        },
        debug,
    )


def _symbols(value: Any) -> set[str]:
    """Return the symbols of all sizes in a document."""
    symbols: set[str] = set()
    stack = [value]
    while stack:
        here = stack.pop()
        if isinstance(here, dict):
            if isinstance(expression := here.get("expr_str"), str):
                symbols.update(_SYMBOL.findall(expression))
            stack += here.values()
        elif isinstance(here, list):
            stack += here
    return symbols


def _plain(value: Any) -> Any:
    """Convert a record of torch's schema to JSON values; each object and list is a new one.

    torch's own conversion looks at every field's description and goes through text, which is
    slower.
    """
    if isinstance(value, _Union):
        return {str(value.type): _plain(value.value)}
    if is_dataclass(value):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


@contextmanager
def serialisable_values(module: torch.fx.GraphModule) -> Iterator[None]:
    """Within the block, values of higher-order calls are tuples: torch's writer accepts neither
    lists nor missing values.
    """
    before: list[tuple[torch.fx.Node, bool, Any]] = []
    for node in calls_in(module):
        value = node.meta.get("val")
        if isinstance(node.target, HigherOrderOperator) and (
            value is None or isinstance(value, list)
        ):
            before.append((node, "val" in node.meta, value))
            node.meta["val"] = tuple(value or ())
    try:
        yield
    finally:
        for node, had, value in before:
            if had:
                node.meta["val"] = value
            else:
                del node.meta["val"]


@functools.cache
def _fields(kind: type) -> Mapping[str, Any]:
    """Return the fields of a class of torch's schema with their types, which torch's own reader
    evaluates again for every node.
    """
    return get_type_hints(kind, globalns=vars(serde))


def _decoded(kind: Any, data: Any) -> Any:
    """Return a value of torch's schema.

    Args:
        kind: its type: a class of the schema, `list[...]`, `dict[str, ...]`, `... | None`, or a
            JSON type.
        data: its JSON, which validate.py has accepted.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        fields, make = _fields(kind), cast(Any, kind)
        if not issubclass(kind, _Union):
            return make(
                **{
                    name: _decoded(field, data[name])
                    for name, field in fields.items()
                    if name in data
                }
            )
        ((name, value),) = data.items()
        return make.create(**{name: _decoded(fields[name], value)})
    match get_origin(kind), get_args(kind):
        case builtins.list, (element,):
            return [_decoded(element, value) for value in data]
        case builtins.dict, (_, element):
            return {key: _decoded(element, value) for key, value in data.items()}
        case _, (inner, types.NoneType):
            return None if data is None else _decoded(inner, data)
    return float(data) if kind is float else data


def _from_json(
    document: Mapping[str, Any], where: str
) -> tuple[
    torch.fx.GraphModule,
    ExportGraphSignature,
    list[Any],
    dict[str, Any],
    dict[str, ValueRanges[Any]],
]:
    with refused(where):
        serialised = _decoded(serde.GraphModule, document["graph_module"])
        ranges = {
            name: ValueRanges(
                _int_to_sympy_int(span["min_val"], -int_oo),
                _int_to_sympy_int(span["max_val"], int_oo),
            )
            for name, span in document["range_constraints"].items()
        }
        reader = GraphModuleDeserializer()
        # All shapes use the same few sizes: parse each of them once.
        reader._parse_sym_expr = functools.lru_cache(None, typed=True)(reader._parse_sym_expr)  # type: ignore[method-assign]
        result = reader.deserialize(serialised, {}, {}, None, ranges)
    _check_whole(result.graph_module, document["graph_module"]["graph"], where)
    for node in calls_in(result.graph_module):
        if "val" not in node.meta and node.target is not operator.getitem:
            # a region that only writes to buffers returns nothing, but torch's verifier requires a
            # value
            node.meta["val"] = ()
    _forget_hints_of_expressions(result.graph_module)
    return (
        result.graph_module,
        result.signature,
        result.module_call_graph,
        result.names_to_symbols,
        ranges,
    )


def _check_whole(module: torch.fx.GraphModule, document: Mapping[str, Any], where: str) -> None:
    """Check that torch has read all arguments of all nodes, and all examples of sizes.

    torch's reader ignores names that an operator does not have, and uses the first example of a
    symbol.

    Raises:
        PackageError: torch has read something else.
    """
    for node in module.graph.nodes:
        _check_examples(node, document, where)
    calls = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    if len(calls) != len(document["nodes"]):
        raise PackageError(
            "torch reads a different number of nodes",
            where=where,
            expected=str(len(document["nodes"])),
            got=str(len(calls)),
        )
    for node, entry in zip(calls, document["nodes"], strict=True):
        names = [argument["name"] for argument in entry["inputs"]]
        known = (
            [argument.name for argument in node.target._schema.arguments]
            if isinstance(node.target, OpOverload)
            else names
        )
        ordered = [name for name in known if name in names] == names and names[
            : len(node.args)
        ] == known[: len(node.args)]
        if len(node.args) + len(node.kwargs) != len(names) or not ordered:
            raise PackageError(
                "a node's arguments do not match those of its operator, in order",
                where=f"{where}, node {entry['name']}",
                expected=f"some of {', '.join(known)}" if known is not names else "each once",
                got=", ".join(names),
            )
        kinds = [argument["kind"] for argument in entry["inputs"]]
        if kinds != [_POSITIONAL] * len(node.args) + [_KEYWORD] * len(node.kwargs):
            raise PackageError(
                "a node's arguments are not passed in the stated way",
                where=f"{where}, node {entry['name']}",
            )
        if entry["outputs"] and "as_none" not in entry["outputs"][0] and node.name != entry["name"]:
            raise PackageError("two nodes have one name", where=where, got=entry["name"])
        bodies = [
            argument["arg"]["as_graph"]
            for argument in entry["inputs"]
            if "as_graph" in argument["arg"]
        ]
        held = [
            value
            for value in (*node.args, *node.kwargs.values())
            if isinstance(value, torch.fx.Node) and value.op == "get_attr"
        ]
        for value, body in zip(held, bodies, strict=True):
            _check_whole(getattr(module, str(value.target)), body["graph"], where)


def _check_examples(node: torch.fx.Node, document: Mapping[str, Any], where: str) -> None:
    """Check that a node's sizes have the examples that the file states.

    Raises:
        PackageError: they do not.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and node.name in document["tensor_values"]:
        meta = document["tensor_values"][node.name]
        sizes = zip(
            (*value.shape, *value.stride()), (*meta["sizes"], *meta["strides"]), strict=True
        )
    elif isinstance(value, torch.SymInt) and node.name in document["sym_int_values"]:
        sizes = zip((value,), (document["sym_int_values"][node.name],), strict=True)
    else:
        return
    for size, spelled in sizes:
        if isinstance(size, torch.SymInt) and "as_expr" in spelled:
            known, stated = size.node.hint, spelled["as_expr"]["hint"]
            if stated != (None if known is None else {"as_int": known}):
                raise PackageError(
                    "the example of a size does not match those of its symbols",
                    where=f"{where}, node {node.name}: {spelled['as_expr']['expr_str']}",
                    expected=str(known),
                    got=str(stated and next(iter(stated.values()))),
                )


def _forget_hints_of_expressions(module: torch.fx.GraphModule) -> None:
    """Remove example values of expressions (32*s0), which torch's reader adds to those of symbols:
    Inductor fails on them.
    """
    for node in module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            environment = mode.shape_env
            # torch 2.11 uses the older name.
            hints = (
                environment.backed_var_to_val
                if hasattr(environment, "backed_var_to_val")
                else environment.var_to_val
            )
            for key in [k for k in hints if not k.is_Symbol]:
                del hints[key]
            return
