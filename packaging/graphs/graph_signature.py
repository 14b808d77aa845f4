"""Comparison of a graph file's inputs, outputs and state with its manifest."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainload.core.canonical_json import canonical_json
from trainload.core.errors import PackageError
from trainload.core.suggestions import did_you_mean
from trainload.packaging.format.manifest import Manifest

SCALAR_TYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    34: "uint32",
    35: "uint64",
}


def check_signature(
    document: Mapping[str, Any],
    manifest: Manifest,
    prefix: str,
    where: str,
    *,
    inputs: Sequence[str] | int,
    outputs: int,
) -> None:
    """Check a validated graph file against the manifest.

    Args:
        document: the graph file.
        manifest: the package's manifest.
        prefix: prefix of the names of the graph's constants.
        where: file name, for errors.
        inputs: keys of the graph's single dict of inputs, in order; or the number of tensors that
            it accepts.
        outputs: number of values that it returns.

    Raises:
        PackageError: state of another name, dtype or shape, or other inputs or outputs.
    """
    graph, signature = document["graph_module"]["graph"], document["graph_module"]["signature"]
    metas = graph["tensor_values"]
    state: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        "parameter": {p.name: (p.dtype, p.shape) for p in manifest.parameters},
        "buffer": {b.name: (b.dtype, b.shape) for b in manifest.buffers},
        "tensor_constant": {
            c.name.removeprefix(f"{prefix}/"): (c.dtype, c.shape)
            for c in manifest.constants
            if c.name.startswith(f"{prefix}/")
        },
    }
    persistent = {b.name: b.persistent for b in manifest.buffers}
    users = 0
    for spec in signature["input_specs"]:
        ((kind, entry),) = spec.items()
        if kind == "user_input":
            users += 1
            continue
        name = entry[f"{kind}_name"]
        if name not in state[kind]:
            raise PackageError(
                f"the graph reads the {kind.replace('_', ' ')} {name}, which the manifest lacks",
                where=where,
            )
        meta = metas.get(entry["arg"]["name"])
        got = (
            None
            if meta is None
            else (
                SCALAR_TYPES.get(meta["dtype"]),
                tuple(size.get("as_int") for size in meta["sizes"]),
            )
        )
        if got != state[kind][name]:
            raise PackageError(
                f"the graph reads {name} with another dtype or shape",
                where=where,
                expected=str(state[kind][name]),
                got=str(got),
            )
        if kind == "buffer" and entry["persistent"] != persistent[name]:
            raise PackageError(
                f"the graph and the manifest disagree on whether buffer {name} is persistent",
                where=where,
            )
    for spec in signature["output_specs"]:
        ((kind, entry),) = spec.items()
        for field, tensors in (
            ("parameter_name", state["parameter"]),
            ("buffer_name", state["buffer"]),
        ):
            if field in entry and entry[field] not in tensors:
                raise PackageError(
                    f"the graph writes {entry[field]}, which the manifest lacks", where=where
                )
    returned = sum(
        "user_output" in spec or "loss_output" in spec for spec in signature["output_specs"]
    )
    expected = inputs if isinstance(inputs, int) else len(inputs)
    if (users, returned) != (expected, outputs):
        raise PackageError(
            "the graph's inputs or outputs do not match the manifest",
            where=where,
            expected=f"{expected} inputs and {outputs} outputs",
            got=f"{users} and {returned}",
        )
    if not isinstance(inputs, int):
        _check_keys(document, list(inputs), where)


def _check_keys(document: Mapping[str, Any], names: list[str], where: str) -> None:
    calls = document["graph_module"]["module_call_graph"]
    if not calls:
        raise PackageError("the graph does not state how it is called", where=where)
    tree = json.loads(calls[0]["signature"]["in_spec"])[1]
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    batch = {
        "type": "builtins.dict",
        "context": canonical_json(names).decode("utf-8"),
        "children_spec": [leaf] * len(names),
    }
    nothing = {"type": "builtins.dict", "context": "[]", "children_spec": []}
    expected_tree = {
        "type": "builtins.tuple",
        "context": "null",
        "children_spec": [
            {"type": "builtins.tuple", "context": "null", "children_spec": [batch]},
            nothing,
        ],
    }
    if tree != expected_tree:
        raise PackageError(
            "the graph does not take one dict of tensors with the manifest's names",
            where=where,
            expected=", ".join(names),
        )


def no_such_graph(name: str, known: Collection[str]) -> PackageError:
    """Return the error for the name of a graph that the package does not have."""
    return PackageError(
        "the package has no such graph",
        where=name,
        expected=", ".join(known),
        hint=did_you_mean(name, known),
    )
