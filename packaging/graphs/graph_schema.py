"""Schema of a graph file, as a table: a subset of torch.export's schema.

A leaf is the name of the validator's method that checks it (`packaging/graphs/validate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

MAX_NODES = 500_000
"""Maximum number of nodes in one file, bodies of control flow included."""
_MAX_ENTRIES = 100_000
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these fields and no others."""

    required: Mapping[str, Schema]
    optional: Mapping[str, Schema] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Union:
    """An object with exactly one of these fields."""

    members: Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class Many:
    """A list of at most `most` items."""

    item: Schema
    most: int = _MAX_ENTRIES


@dataclass(frozen=True, slots=True)
class Table:
    """An object of any keys; all keys and all values are checked in the same way."""

    key: Schema
    item: Schema


@dataclass(frozen=True, slots=True)
class Maybe:
    """Null, or an item."""

    item: Schema


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several strings or numbers."""

    allowed: frozenset[Any]


Schema: TypeAlias = "str | Record | Union | Many | Table | Maybe | Choice"

_SCALAR_TYPE = Choice(frozenset([*range(1, 14), *range(28, 36)]))
_STRIDED = Choice(frozenset({7}))
_TENSOR = Record({"name": "identifier"})
_DEVICE = Record({"type": Choice(frozenset({"cpu", "cuda", "meta"})), "index": Maybe("small")})

# Sizes, in the description of a value and as an argument.
_SYM_INT = Union({"as_expr": "sized_expression", "as_int": "integer"})
_SYM_FLOAT = Union({"as_expr": "sized_expression", "as_float": "number"})
_SYM_BOOL = Union({"as_expr": "sized_expression", "as_bool": "boolean"})
_SYM_INT_ARGUMENT = Union({"as_name": "identifier", "as_int": "integer"})
_SYM_FLOAT_ARGUMENT = Union({"as_name": "identifier", "as_float": "number"})
_SYM_BOOL_ARGUMENT = Union({"as_name": "identifier", "as_bool": "boolean"})
_HINT = Union({"as_int": "integer", "as_bool": "boolean", "as_float": "number"})
SIZED_EXPRESSION = Record({"expr_str": "expression", "hint": Maybe(_HINT)})
"""A symbolic size and its value in the example batch."""

_DIMS = Many(_SYM_INT, _MAX_DIMS)
_TENSOR_META = Record(
    {
        "dtype": _SCALAR_TYPE,
        "sizes": _DIMS,
        "requires_grad": "boolean",
        "device": _DEVICE,
        "strides": _DIMS,
        "storage_offset": "zero",
        "layout": _STRIDED,
    }
)

_OPTIONAL_TENSOR = Union({"as_tensor": _TENSOR, "as_none": "boolean"})
_ARGUMENTS: Mapping[str, Schema] = {
    "as_none": "boolean",
    "as_tensor": _TENSOR,
    "as_tensors": Many(_TENSOR),
    "as_int": "integer",
    "as_ints": Many("integer"),
    "as_float": "number",
    "as_floats": Many("number"),
    "as_string": "string",
    "as_strings": Many("string"),
    "as_sym_int": _SYM_INT_ARGUMENT,
    "as_sym_ints": Many(_SYM_INT_ARGUMENT),
    "as_scalar_type": _SCALAR_TYPE,
    "as_memory_format": Choice(frozenset(range(1, 5))),
    "as_layout": _STRIDED,
    "as_device": _DEVICE,
    "as_bool": "boolean",
    "as_bools": Many("boolean"),
    "as_sym_bool": _SYM_BOOL_ARGUMENT,
    "as_sym_bools": Many(_SYM_BOOL_ARGUMENT),
    "as_sym_float": _SYM_FLOAT_ARGUMENT,
    "as_sym_floats": Many(_SYM_FLOAT_ARGUMENT),
    "as_graph": Record({"name": "identifier", "graph": "body"}),
    "as_optional_tensors": Many(_OPTIONAL_TENSOR),
    "as_optional_tensor": _OPTIONAL_TENSOR,
    "as_complex": Record({"real": "number", "imag": "number"}),
    "as_nested_tensors": Many(Many(_TENSOR)),
    "as_int_lists": Many(Many("integer")),
    "as_float_lists": Many(Many("number")),
    "as_operator": "operator",
}
_VALUES = (
    "as_none",
    "as_tensor",
    "as_tensors",
    "as_sym_int",
    "as_sym_ints",
    "as_sym_bool",
    "as_sym_float",
    "as_sym_floats",
)


def _arguments(*names: str) -> Union:
    return Union({name: _ARGUMENTS[name] for name in names})


ARGUMENT = Union(_ARGUMENTS)
"""An argument of a node."""
_RESULT = _arguments(*_VALUES)
_OUTPUT = _arguments(*_VALUES, "as_int", "as_float", "as_bool")
_INPUT = _arguments("as_tensor", "as_sym_int")

NODE = Record(
    {
        "target": "target",
        "inputs": Many("named_argument"),
        "outputs": Many(_RESULT),
        "metadata": Record({}, {"nn_module_stack": "module_stack"}),
        "is_hop_single_tensor_return": Maybe("boolean"),
        "name": "identifier",
    }
)
GRAPH = Record(
    {
        "inputs": Many(_INPUT),
        "outputs": Many(_OUTPUT),
        "nodes": Many("node", MAX_NODES),
        "tensor_values": Table("identifier", _TENSOR_META),
        "sym_int_values": Table("identifier", _SYM_INT),
        "sym_bool_values": Table("identifier", _SYM_BOOL),
        "sym_float_values": Table("identifier", _SYM_FLOAT),
        "is_single_tensor_return": "boolean",
        "custom_obj_values": Record({}),
    }
)
_INPUT_SPEC = Union(
    {
        "user_input": Record({"arg": _INPUT}),
        "parameter": Record({"arg": _TENSOR, "parameter_name": "fqn"}),
        "buffer": Record({"arg": _TENSOR, "buffer_name": "fqn", "persistent": "boolean"}),
        "tensor_constant": Record({"arg": _TENSOR, "tensor_constant_name": "fqn"}),
    }
)
_OUTPUT_SPEC = Union(
    {
        "user_output": Record({"arg": _OUTPUT}),
        "loss_output": Record({"arg": _TENSOR}),
        "buffer_mutation": Record({"arg": _TENSOR, "buffer_name": "fqn"}),
        "parameter_mutation": Record({"arg": _TENSOR, "parameter_name": "fqn"}),
        "gradient_to_parameter": Record({"arg": _TENSOR, "parameter_name": "fqn"}),
    }
)
_CALL = Record(
    {
        "inputs": Many(ARGUMENT, 0),
        "outputs": Many(ARGUMENT, 0),
        "in_spec": "treespec",
        "out_spec": "treespec",
        "forward_arg_names": Maybe(Many("identifier")),
    }
)
GRAPH_MODULE = Record(
    {
        "graph": "graph",
        "signature": Record({"input_specs": Many(_INPUT_SPEC), "output_specs": Many(_OUTPUT_SPEC)}),
        "module_call_graph": Many(Record({"fqn": Choice(frozenset({""})), "signature": _CALL}), 1),
    }
)
DOCUMENT = Record(
    {
        "graph_module": "graph_module",
        "range_constraints": Table(
            "symbol", Record({"min_val": Maybe("integer"), "max_val": Maybe("integer")})
        ),
    }
)
