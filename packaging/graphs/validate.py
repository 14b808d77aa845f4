"""Validation of graph files before torch reads them.

torch's own reader evaluates symbolic expressions, imports names from treespecs and executes guards.
So a graph file is restricted to a subset of torch.export's schema that cannot express any of these:
every field is known here, and every string has a grammar.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NoReturn

from trainload.capture.job.names import is_dotted_name
from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import PackageError, UnsafePackageError
from trainload.packaging.graphs.allowed_operators import HIGHER_ORDER, check_operator
from trainload.packaging.graphs.expressions import check_expression
from trainload.packaging.graphs.graph_schema import (
    ARGUMENT,
    DOCUMENT,
    GRAPH,
    GRAPH_MODULE,
    MAX_NODES,
    NODE,
    SIZED_EXPRESSION,
    Choice,
    Many,
    Maybe,
    Record,
    Schema,
    Table,
    Union,
)

Check = Callable[[Any], None]
_SCHEMAS: Mapping[str, Schema] = {
    "document": DOCUMENT,
    "graph_module": GRAPH_MODULE,
    "graph": GRAPH,
    "node": NODE,
    "argument": ARGUMENT,
    "sized_expression": SIZED_EXPRESSION,
}
"""Schemas that methods of the validator apply; these methods check more than the table says."""

MAX_BODIES = 12
"""Maximum nesting depth of control flow bodies."""
MAX_STRING = 4096

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
_SYMBOL = re.compile(r"[a-z]{1,8}\d{1,6}")
_MODULE = re.compile(r"[A-Za-z0-9_.@-]{0,512}")
_CALL = re.compile(r"@\d{1,6}")
_QUOTED = re.compile(r"Symbol\('([a-z]{1,8}[0-9]{1,6})'")
_SINGLE = frozenset({"as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float"})
_INFINITE = frozenset({"Infinity", "-Infinity", "NaN"})
_NODE = b'"is_hop_single_tensor_return":'
"""A key that occurs once per node and in nothing else that is accepted: quotes within strings are
escaped by a backslash.
"""
MODULE_TYPE = "torch.nn.Module"
"""Placeholder for a module's class in a graph file."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Operators that a valid graph file calls: with a schema ("torch.ops.aten.add.Tensor"), and
    higher-order ones ("cond").
    """

    operators: frozenset[str]
    higher_order: frozenset[str]
    namespaces: frozenset[str]


def parse_graph(data: bytes, where: str) -> Any:
    """Decode the file of a graph or step graph, which may be hostile.

    The result has not been validated.

    Nodes are counted before parsing, which takes a thousandth of the time.

    Raises:
        UnsafePackageError: the file has too many nodes; otherwise as `parse_canonical`.
        IntegrityError: as `parse_canonical`.
    """
    nodes = data.count(_NODE)
    if nodes > MAX_NODES:
        raise UnsafePackageError(
            f"a file must contain at most {MAX_NODES} nodes", where=where, got=str(nodes)
        )
    return parse_canonical(data, where)


def validate_graph(document: object, where: str, namespaces: Set[str] = frozenset()) -> GraphFacts:
    """Check a parsed graph file.

    Args:
        document: result of `parse_canonical`.
        where: the file's name, for errors.
        namespaces: trusted namespaces of operators of other libraries.

    Raises:
        UnsafePackageError: the file breaks a rule; the message names file, node and rule.
    """
    validator = _Validator(where, namespaces)
    validator.document(document)
    validator.check_known_symbols(document)
    return GraphFacts(
        frozenset(validator.operators),
        frozenset(validator.higher_order),
        frozenset(validator.used_namespaces),
    )


class _Validator:
    def __init__(self, where: str, namespaces: Set[str]) -> None:
        self.file = where
        self.at = "the file"
        self.namespaces = namespaces
        self.nodes = 0
        self.bodies = 0
        self.operators: set[str] = set()
        self.higher_order: set[str] = set()
        self.used_namespaces: set[str] = set()
        self.hints: dict[str, Any] = {}
        self._compiled: dict[int, Check] = {}
        self._checks = {name: self.compiled(schema) for name, schema in _SCHEMAS.items()}

    def compiled(self, schema: Schema) -> Check:
        """Return the check of a schema, which is compiled once."""
        if isinstance(schema, str):
            check: Check = getattr(self, schema)
            return check
        if id(schema) not in self._compiled:
            self._compiled[id(schema)] = self._compile(schema)
        return self._compiled[id(schema)]

    def _compile(self, schema: Schema) -> Check:
        match schema:
            case Record(required, optional):
                return self.record(
                    *(
                        {key: self.compiled(each) for key, each in fields.items()}
                        for fields in (required, optional)
                    )
                )
            case Union(members):
                return self.union({key: self.compiled(each) for key, each in members.items()})
            case Many(item, most):
                return self.many(self.compiled(item), most)
            case Table(key, item):
                return self.table(self.compiled(key), self.compiled(item))
            case Maybe(item):
                return self.maybe(self.compiled(item))
            case Choice(allowed):
                return self.choice(allowed)
        raise AssertionError(schema)

    # JSON structures.

    def refuse(self, rule: str, got: object) -> NoReturn:
        excerpt = repr(got)
        raise UnsafePackageError(
            rule,
            where=f"{self.file}, {self.at}",
            got=excerpt if len(excerpt) <= 120 else excerpt[:117] + "...",
        )

    def record(self, required: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
        fields = {**required, **optional}

        def check(value: Any) -> None:
            if not isinstance(value, dict):
                self.refuse("must be an object", value)
            for key in required:
                if key not in value:
                    self.refuse(f"the field {key} is missing", sorted(value))
            for key, entry in value.items():
                if key not in fields:
                    self.refuse("unknown field", key)
                fields[key](entry)

        return check

    def union(self, members: Mapping[str, Check]) -> Check:
        def check(value: Any) -> None:
            if not isinstance(value, dict) or len(value) != 1:
                self.refuse("must be an object with one field", value)
            ((key, entry),) = value.items()
            if key not in members:
                self.refuse("this kind of value is not allowed here", key)
            members[key](entry)

        return check

    def many(self, item: Check, most: int) -> Check:
        def check(value: Any) -> None:
            if not isinstance(value, list) or len(value) > most:
                self.refuse(
                    f"must be a list of at most {most} items",
                    value if not isinstance(value, list) else f"{len(value)} items",
                )
            for entry in value:
                item(entry)

        return check

    def table(self, key: Check, item: Check) -> Check:
        def check(value: Any) -> None:
            if not isinstance(value, dict):
                self.refuse("must be an object", value)
            for name, entry in value.items():
                key(name)
                item(entry)

        return check

    def maybe(self, item: Check) -> Check:
        def check(value: Any) -> None:
            if value is not None:
                item(value)

        return check

    def choice(self, allowed: frozenset[Any]) -> Check:
        def check(value: Any) -> None:
            if isinstance(value, bool | float | list | dict) or value not in allowed:
                self.refuse(f"must be one of {sorted(allowed)}", value)

        return check

    # Values.

    def boolean(self, value: Any) -> None:
        if not isinstance(value, bool):
            self.refuse("must be true or false", value)

    def zero(self, value: Any) -> None:
        if (
            not isinstance(value, dict)
            or set(value) != {"as_int"}
            or type(value["as_int"]) is not int
            or value["as_int"] != 0
        ):
            self.refuse("a storage offset must be 0", value)

    def integer(self, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
            self.refuse("must be a 64-bit integer", value)

    def small(self, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 128:
            self.refuse("must be an integer from 0 to 127", value)

    def number(self, value: Any) -> None:
        if not isinstance(value, float) and not (isinstance(value, str) and value in _INFINITE):
            self.refuse("must be a floating-point number", value)

    def string(self, value: Any) -> None:
        if not isinstance(value, str) or len(value) > MAX_STRING:
            self.refuse(f"must be a string of at most {MAX_STRING} characters", value)

    def matching(self, value: Any, pattern: re.Pattern[str], description: str) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.refuse(f"must be {description}", value)

    def identifier(self, value: Any) -> None:
        self.matching(value, _IDENTIFIER, "an identifier")
        if keyword.iskeyword(value) or value.startswith("__"):
            self.refuse("a value has a reserved name", value)

    def fqn(self, value: Any) -> None:
        if not isinstance(value, str) or not is_dotted_name(value):
            self.refuse("must be a dotted name", value)

    def symbol(self, value: Any) -> None:
        self.matching(value, _SYMBOL, "a symbol (letters followed by digits)")

    def module_stack(self, value: Any) -> None:
        self.string(value)
        for item in value.split(";"):
            key, _, rest = item.partition(",")
            path, _, kind = rest.partition(",")
            self.matching(path, _MODULE, "a module's path")
            if (
                not (
                    key == path
                    or (key.startswith(f"{path}@") and _CALL.fullmatch(key[len(path) :]))
                )
                or kind != MODULE_TYPE
            ):
                self.refuse("a module stack must contain only paths", item)

    def expression(self, value: Any) -> None:
        if not isinstance(value, str):
            self.refuse("must be a symbolic size", value)
        check_expression(value, f"{self.file}, {self.at}")

    def sized_expression(self, value: Any) -> None:
        self._checks["sized_expression"](value)
        if self.hints.setdefault(value["expr_str"], value["hint"]) != value["hint"]:
            self.refuse("an expression must have the same example throughout a file", value)

    def treespec(self, value: Any) -> None:
        if not isinstance(value, str):
            self.refuse("must be a treespec", value)
        spec = self.embedded(value, 200_000, 16)
        if not isinstance(spec, list) or len(spec) != 2 or spec[0] != 1:
            self.refuse("must be a treespec of protocol 1", value)
        self.tree(spec[1])

    def embedded(self, text: str, most: int, depth: int) -> Any:
        try:
            return parse_canonical(
                text.encode("utf-8", "replace"),
                f"{self.file}, {self.at}, treespec",
                max_bytes=most,
                max_depth=depth,
            )
        except UnsafePackageError:
            raise
        except PackageError as error:
            self.refuse(f"a treespec is not canonical JSON: {error.problem}", text)

    def tree(self, spec: Any) -> None:
        if (
            not isinstance(spec, dict)
            or set(spec) != {"type", "context", "children_spec"}
            or not isinstance(spec["children_spec"], list)
        ):
            self.refuse("a treespec must have type, context and children_spec", spec)
        kind, context, children = spec["type"], spec["context"], spec["children_spec"]
        if kind is None:
            if context is not None or children:
                self.refuse("a leaf of a treespec must be empty", spec)
        elif kind in ("builtins.tuple", "builtins.list"):
            if context != "null":
                self.refuse("a tuple of a treespec must have no context", context)
        elif kind == "builtins.dict":
            keys = self.embedded(context, 100_000, 2) if isinstance(context, str) else None
            if (
                not isinstance(keys, list)
                or len(keys) != len(children)
                or len(set(map(str, keys))) != len(keys)
            ):
                self.refuse("a dict of a treespec must list its keys", context)
            for key in keys:
                self.fqn(key)
        else:
            self.refuse("a treespec may contain only tuples, lists and dicts", kind)
        for child in children:
            self.tree(child)

    def check_known_symbols(self, document: Any) -> None:
        """Check that range constraints limit only symbols that occur in a size."""
        size_symbols = {
            symbol for expression in self.hints for symbol in _QUOTED.findall(expression)
        }
        for symbol in document["range_constraints"]:
            if symbol not in size_symbols:
                self.refuse("range_constraints limit a symbol that occurs in no size", symbol)

    # Graphs.

    def document(self, value: Any) -> None:
        self._checks["document"](value)

    def graph_module(self, value: Any) -> None:
        self._checks["graph_module"](value)
        for end in ("input", "output"):
            specs, values = value["signature"][f"{end}_specs"], value["graph"][f"{end}s"]
            if canonical_json([_argument(spec) for spec in specs]) != canonical_json(values):
                self.refuse(
                    f"the signature must name the graph's {end}s, in order",
                    next((_argument(s) for s in specs if _argument(s) not in values), len(specs)),
                )

    def named_argument(self, value: Any) -> None:
        if not isinstance(value, dict) or set(value) != {"name", "arg", "kind"}:
            self.refuse("an argument must have name, arg and kind", value)
        if not isinstance(value["name"], str) or (
            value["name"] and not _IDENTIFIER.fullmatch(value["name"])
        ):
            self.refuse("an argument's name must be an identifier or empty", value["name"])
        if type(value["kind"]) is not int or value["kind"] not in (1, 2):
            self.refuse("an argument's kind must be 1 or 2", value["kind"])
        if value["kind"] == 2 and keyword.iskeyword(value["name"]):
            self.refuse("a keyword argument's name must not be a Python keyword", value["name"])
        self._checks["argument"](value["arg"])

    def graph(self, value: Any) -> None:
        self._checks["graph"](value)
        defined = {name for result in value["inputs"] for name in _names(result)}
        defined |= {
            name for node in value["nodes"] for result in node["outputs"] for name in _names(result)
        }
        for table in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"):
            strangers = sorted(value[table].keys() - defined)
            if strangers:
                self.refuse(f"{table} describes a value that no node computes", strangers[0])

    def node(self, value: Any) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self.refuse(f"a file must contain at most {MAX_NODES} nodes", self.nodes)
        before = self.at
        self.at = f"node {str(value.get('name'))[:80] if isinstance(value, dict) else '?'}"
        self._checks["node"](value)
        results = [name for result in value["outputs"] for name in _names(result)]
        is_hop = value["target"].startswith("torch.ops.higher_order.")
        if value["is_hop_single_tensor_return"] is not None and not is_hop:
            self.refuse(
                "only an operator that takes graphs may state whether it returns one tensor",
                value["is_hop_single_tensor_return"],
            )
        single = value["is_hop_single_tensor_return"] or not is_hop
        if (
            single
            and len(value["outputs"]) == 1
            and set(value["outputs"][0]) <= _SINGLE
            and results
            and results != [value["name"]]
        ):
            self.refuse("a node that computes one value must have its name", results[0])
        self.at = before

    def target(self, value: Any) -> None:
        self.string(value)
        namespace = check_operator(value, f"{self.file}, {self.at}", self.namespaces)
        if namespace is not None:
            self.operators.add(value)
            self.used_namespaces.add(namespace)
        elif value.startswith("torch.ops.higher_order."):
            self.higher_order.add(value.removeprefix("torch.ops.higher_order."))

    def operator(self, value: Any) -> None:
        self.target(value)
        if (
            not value.startswith("torch.ops.")
            or value.removeprefix("torch.ops.higher_order.") in HIGHER_ORDER
        ):
            self.refuse("an operator passed as an argument must have a schema", value)

    def body(self, value: Any) -> None:
        self.bodies += 1
        if self.bodies > MAX_BODIES:
            self.refuse(
                f"control flow must be nested at most {MAX_BODIES} levels deep", self.bodies
            )
        self.graph(value)
        self.bodies -= 1


def _argument(spec: Mapping[str, Any]) -> Any:
    """Return the value of a signature's entry, as the graph lists it."""
    ((kind, entry),) = spec.items()
    return entry["arg"] if kind in ("user_input", "user_output") else {"as_tensor": entry["arg"]}


def _names(result: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that an entry of a node's outputs or a graph's inputs
    defines.
    """
    ((_, entry),) = result.items()
    entries = entry if isinstance(entry, list) else [entry]
    return [
        name
        for each in entries
        if isinstance(each, dict)
        for name in (each.get("name"), each.get("as_name"))
        if isinstance(name, str)
    ]
