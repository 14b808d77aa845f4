"""Graphs to JSON and back: the one module of packaging/ that touches torch's private names.

Run on torch 2.13.0. The private names are those of `torch._export.serde` (torch.export's own schema, major version 8), `torch._ops`,
`torch._C.parse_schema` and the constructor of ExportedProgram. Nothing here reads pickles, and nothing here may be given a
document that `validate.validate_graph` has not passed.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch._export.serde import schema as serde
from torch._export.serde.serialize import (
    GraphModuleDeserializer,
    GraphModuleSerializer,
    SerializeError,
    _dict_to_dataclass,
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

from trainload.capture import ctc, gamma, higher_order  # noqa: F401 - their operators must be registered before a graph that is read names them
from trainload.capture.errors import PackageError
from trainload.capture.operators import calls_in, nodes_in
from trainload.capture.quiet import quiet_torch
from trainload.packaging.canonical import canonical_json
from trainload.packaging.validate import MODULE_TYPE

_DIALECT = "TRAINING"
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
"""What torch's reader and writer raise for a graph that they cannot take."""


class GraphJson(NamedTuple):
    """A graph as JSON: what it computes, and apart from it what names the machine, the folder and the source."""

    document: dict[str, Any]
    debug: dict[str, Any]


def graph_to_json(exported: ExportedProgram, where: str = "graph") -> GraphJson:
    """Serialise a training-IR graph, without weights, constants and example inputs.

    Law: the document depends on the program alone: not on folder, process, hash seed or torch's patch version.

    Raises:
        PackageError: torch's schema cannot say it; the message names the node.
    """
    with _refused(where), serialisable_values(exported.graph_module):
        exported.validate()  # type: ignore[no-untyped-call]
    return _to_json(
        exported.graph_module,
        exported.graph_signature,
        [entry for entry in exported.module_call_graph if entry.fqn == ""],
        # A derived dim (2*s0) has a range too, which follows from its root's.
        {symbol: span for symbol, span in exported.range_constraints.items() if symbol.is_Symbol},
        list(exported._guards_code),
        where,
    )


def graph_from_json(
    document: Mapping[str, Any], state: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor], where: str = "graph"
) -> ExportedProgram:
    """Rebuild a graph from a validated document.

    Args:
        document: as `graph_to_json` made it and `validate_graph` passed it.
        state: a tensor (of any device, so also a meta one) for every parameter and buffer that the graph reads. Names that share a
            tensor stay tied.
        constants: a tensor for every tensor constant.
        where: file name, for errors.

    Raises:
        PackageError: torch refuses it, or a tensor is missing.
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
            raise PackageError(f"the graph reads {target}, which the package does not hold", where=where)
        separate = spec.kind == InputKind.CONSTANT_TENSOR or (spec.kind == InputKind.BUFFER and not spec.persistent)
        (held if separate else bound)[target] = source[target]
    with _refused(where):
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=signature,
            state_dict=bound,
            range_constraints={symbols[name]: span for name, span in ranges.items() if name in symbols},
            module_call_graph=calls,
            example_inputs=None,
            constants=held,
            verifiers=[load_verifier(_DIALECT)],
        )


def with_graph(exported: ExportedProgram, module: torch.fx.GraphModule, where: str = "graph") -> ExportedProgram:
    """The same program with another graph, of the same inputs and as many outputs.

    Raises:
        PackageError: the inputs are others, or torch refuses the graph.
    """
    signature = exported.graph_signature
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    expected = [spec.arg.name for spec in signature.input_specs]
    if names != expected:
        changed = sorted(set(names) ^ set(expected)) or ["their order"]
        raise PackageError(
            "the new graph has other inputs", where=where, expected="the old one's", got=f"a change of {', '.join(changed[:4])}"
        )
    results = next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0]
    if not isinstance(results, tuple | list) or len(results) != len(signature.output_specs):
        got = str(len(results)) if isinstance(results, tuple | list) else "something else"
        raise PackageError("the new graph has other outputs", where=where, expected=f"{len(signature.output_specs)} values", got=got)
    outputs = [
        OutputSpec(kind=spec.kind, arg=_argument(node) if isinstance(node, torch.fx.Node) else spec.arg, target=spec.target)
        for spec, node in zip(signature.output_specs, results, strict=True)
    ]
    with _refused(where), serialisable_values(module):
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=ExportGraphSignature(list(signature.input_specs), outputs),
            state_dict=dict(exported.state_dict),
            range_constraints=dict(exported.range_constraints),
            module_call_graph=list(exported.module_call_graph),
            example_inputs=None,
            constants=dict(exported.constants),
            verifiers=[load_verifier(_DIALECT)],
        )


def flat_to_json(module: torch.fx.GraphModule, where: str = "graph") -> GraphJson:
    """Serialise a flat graph whose inputs and outputs are all plain values with `meta["val"]` (a step graph).

    Raises:
        PackageError: torch's schema cannot say it.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    output = next(node for node in module.graph.nodes if node.op == "output")
    inputs = [InputSpec(kind=InputKind.USER_INPUT, arg=_argument(node), target=None) for node in placeholders]
    outputs = [OutputSpec(kind=OutputKind.USER_OUTPUT, arg=_argument(node), target=None) for node in output.args[0]]
    return _to_json(module, ExportGraphSignature(inputs, outputs), [], _ranges(module), [], where)


def flat_from_json(document: Mapping[str, Any], where: str = "graph") -> torch.fx.GraphModule:
    """The inverse of `flat_to_json`, from a validated document. Every node has `meta["val"]` of one FakeTensorMode.

    Raises:
        PackageError: torch refuses it.
    """
    return _from_json(document, where)[0]


def running_schema(name: str) -> str | None:
    """The schema that the running torch has for "torch.ops.aten.add.Tensor"; None: it has no such operator."""
    overload = _overload(name)
    return None if overload is None else str(overload._schema)


def schema_still_fits(name: str, recorded: str) -> bool:
    """Whether the running torch's operator takes every call that the recorded schema allowed."""
    overload = _overload(name)
    if overload is None:
        return False
    if str(overload._schema) == recorded:
        return True
    try:
        running: Any = overload._schema  # the stubs lack its methods
        return bool(running.is_backward_compatible_with(torch._C.parse_schema(recorded)))
    except RuntimeError:  # the recorded text is no schema
        return False


def _overload(name: str) -> OpOverload | None:
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    if not isinstance(found, OpOverload):
        return None
    name_of: str = found.name()  # type: ignore[no-untyped-call]
    return found if torch._C._dispatch_has_kernel(name_of) else None


@contextmanager
def _refused(where: str) -> Iterator[None]:
    try:
        yield
    except PackageError:
        raise
    except _REFUSALS as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        head = f"{lines[0].strip()[:200]}: " if len(lines) > 1 else ""
        raise PackageError(f"torch {torch.__version__} refuses the graph: {head}{reason[:400]}", where=where) from error


def _argument(node: torch.fx.Node) -> TensorArgument | SymIntArgument:
    return TensorArgument(name=node.name) if isinstance(node.meta["val"], torch.Tensor) else SymIntArgument(name=node.name)


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
    with _refused(where), serialisable_values(module), quiet_torch():
        serialised = GraphModuleSerializer(signature, list(calls)).serialize(module)
        document = _plain({"graph_module": serialised, "range_constraints": serialize_range_constraints(dict(ranges))})
    graph_module = document["graph_module"]
    notes: dict[str, Any] = {}
    _strip_graph(graph_module["graph"], "", notes, where)
    for entry in graph_module["module_call_graph"]:
        call = entry["signature"]
        call["inputs"], call["outputs"] = [], []
        call["in_spec"], call["out_spec"] = _plain_treespec(call["in_spec"]), _plain_treespec(call["out_spec"])
    kept = {key: graph_module[key] for key in ("graph", "signature", "module_call_graph")}
    debug = {"nodes": notes, "guards": guards, "torch": torch.__version__, "schema": list(serde.SCHEMA_VERSION)}
    return GraphJson({"graph_module": kept, "range_constraints": document["range_constraints"]}, debug)


def _plain(value: Any) -> Any:
    """A record of torch's schema as JSON values, each object and list a new one. torch's own way there goes over every field's description
    and through text.
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
    """Within it, higher-order calls have tuples as values (torch's writer takes no lists there), and never none at all."""
    before: list[tuple[torch.fx.Node, bool, Any]] = []
    for node in calls_in(module):
        value = node.meta.get("val")
        if isinstance(node.target, HigherOrderOperator) and (value is None or isinstance(value, list)):
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


_CALL = re.compile(r"@\d{1,6}$")
_NODE_FIELDS = ("target", "inputs", "outputs", "metadata", "is_hop_single_tensor_return", "name")
_GRAPH_FIELDS = (
    "inputs",
    "outputs",
    "nodes",
    "tensor_values",
    "sym_int_values",
    "sym_bool_values",
    "sym_float_values",
    "is_single_tensor_return",
    "custom_obj_values",
)


def _strip_graph(graph: dict[str, Any], path: str, notes: dict[str, Any], where: str) -> None:
    """Keep the format's own fields, and of the metadata only the paths and calls of modules; the rest goes to `notes`."""
    _keep(graph, _GRAPH_FIELDS, where)
    for meta in graph["tensor_values"].values():
        meta["storage_offset"] = {"as_int": 0}  # torch's reader knows no other, and a graph read back is to be written as it was
    for node in graph["nodes"]:
        _keep(node, _NODE_FIELDS, where)
        metadata = node["metadata"]
        told = {key: metadata[key] for key in ("stack_trace", "nn_module_stack", "torch_fn") if key in metadata}
        if told:
            notes[path + str(node["name"])] = told
        stack = _module_paths(metadata.get("nn_module_stack", ""))
        node["metadata"] = {"nn_module_stack": stack} if stack else {}
        for argument in node["inputs"]:
            argument["kind"] = argument["kind"] or 1
            body = argument["arg"].get("as_graph") if isinstance(argument["arg"], dict) else None
            if body is not None:
                _strip_graph(body["graph"], f"{path}{node['name']}/{body['name']}/", notes, where)


def _keep(record: dict[str, Any], fields: Sequence[str], where: str) -> None:
    for key in [key for key in record if key not in fields]:
        if record.pop(key):
            raise PackageError(f"this torch writes the field {key}, which the format does not have", where=where, cure="Use torch 2.13.")


def _module_paths(stack: str) -> str:
    """From "key,path,class;..." to "path@1,path,torch.nn.Module;...": classes, and the keys of strict mode, name the source.

    Of a key its number stays, which tells a module's second call from its first: unflattening needs it.
    """
    entries: list[str] = []
    for item in stack.split(";") if stack else ():
        parts = item.split(",")
        path = parts[1] if len(parts) >= 3 else ""
        call = _CALL.search(parts[0])
        entry = f"{path}{call[0] if call else ''},{path},{MODULE_TYPE}"
        if all((letter.isalnum() and letter.isascii()) or letter in "_.@-" for letter in path) and entry not in entries:
            entries.append(entry)
    return ";".join(entries)


def _plain_treespec(text: str) -> str:
    """The treespec as canonical JSON, its contexts too."""

    def plain(spec: dict[str, Any]) -> dict[str, Any]:
        context = spec["context"]
        if isinstance(context, str):
            context = canonical_json(json.loads(context)).decode("utf-8")
        return {"type": spec["type"], "context": context, "children_spec": [plain(child) for child in spec["children_spec"]]}

    protocol, spec = json.loads(text)
    return canonical_json([protocol, plain(spec)]).decode("utf-8")


def _from_json(
    document: Mapping[str, Any], where: str
) -> tuple[torch.fx.GraphModule, ExportGraphSignature, list[Any], dict[str, Any], dict[str, ValueRanges[Any]]]:
    with _refused(where):
        serialised = _dict_to_dataclass(serde.GraphModule, document["graph_module"])  # type: ignore[no-untyped-call]
        ranges = {
            name: ValueRanges(_int_to_sympy_int(span["min_val"], -int_oo), _int_to_sympy_int(span["max_val"], int_oo))
            for name, span in document["range_constraints"].items()
        }
        result = GraphModuleDeserializer().deserialize(serialised, {}, {}, None, ranges)
    for node in calls_in(result.graph_module):
        if "val" not in node.meta and node.target is not operator.getitem:
            node.meta["val"] = ()  # a region that only writes to buffers returns nothing; torch's verifier wants a value
    _forget_hints_of_expressions(result.graph_module)
    return result.graph_module, result.signature, result.module_call_graph, result.names_to_symbols, ranges


def _forget_hints_of_expressions(module: torch.fx.GraphModule) -> None:
    """The reader of torch notes example values for expressions (32*s0) beside those of symbols; Inductor stumbles over them."""
    for node in module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            environment = mode.shape_env
            # torch 2.11 has the older name
            hints = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
            for key in [k for k in hints if not k.is_Symbol]:
                del hints[key]
            return


def operator_namespaces(module: torch.fx.GraphModule) -> frozenset[str]:
    """The namespaces of the operators that a graph and its bodies call."""
    return frozenset(node.target.namespace for node in nodes_in(module) if isinstance(node.target, OpOverload))
