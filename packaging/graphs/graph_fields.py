"""Conversion of torch.export's JSON to a package's: only the format's fields, without names of
machines, folders or sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trainload.core.canonical_json import canonical_json
from trainload.core.errors import PackageError
from trainload.packaging.graphs.validate import MODULE_TYPE

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


def strip_graph(graph: dict[str, Any], path: str, notes: dict[str, Any], where: str) -> None:
    """Keep the format's own fields, with module paths and calls; move other metadata to `notes`."""
    _strip_fields(graph, _GRAPH_FIELDS, where)
    for meta in graph["tensor_values"].values():
        # torch's reader drops offsets; a graph that is read back must be written as it was
        meta["storage_offset"] = {"as_int": 0}
    for node in graph["nodes"]:
        _strip_fields(node, _NODE_FIELDS, where)
        metadata = node["metadata"]
        node_notes = {
            key: metadata[key]
            for key in ("stack_trace", "nn_module_stack", "torch_fn")
            if key in metadata
        }
        if node_notes:
            notes[path + str(node["name"])] = node_notes
        stack = _module_paths(metadata.get("nn_module_stack", ""))
        node["metadata"] = {"nn_module_stack": stack} if stack else {}
        for argument in node["inputs"]:
            argument["kind"] = argument["kind"] or 1
            body = argument["arg"].get("as_graph") if isinstance(argument["arg"], dict) else None
            if body is not None:
                strip_graph(body["graph"], f"{path}{node['name']}/{body['name']}/", notes, where)


def _strip_fields(record: dict[str, Any], fields: Sequence[str], where: str) -> None:
    for key in [key for key in record if key not in fields]:
        if record.pop(key):
            raise PackageError(
                f"this torch writes the field {key}, which the format does not have",
                where=where,
                hint="Use torch 2.13.",
            )


def _module_paths(stack: str) -> str:
    """Convert "key,path,class;..." to "path@1,path,torch.nn.Module;...": classes and strict-mode
    keys name the source.

    The number of a key stays. It distinguishes a module's second call from its first, which torch's
    unflattening needs.
    """
    entries: list[str] = []
    for item in stack.split(";") if stack else ():
        parts = item.split(",")
        path = parts[1] if len(parts) >= 3 else ""
        call = _CALL.search(parts[0])
        entry = f"{path}{call[0] if call else ''},{path},{MODULE_TYPE}"
        if (
            all((letter.isalnum() and letter.isascii()) or letter in "_.@-" for letter in path)
            and entry not in entries
        ):
            entries.append(entry)
    return ";".join(entries)


def plain_treespec(text: str) -> str:
    """Return the treespec as canonical JSON, contexts included."""

    def plain(spec: dict[str, Any]) -> dict[str, Any]:
        context = spec["context"]
        if isinstance(context, str):
            context = canonical_json(json.loads(context)).decode("utf-8")
        return {
            "type": spec["type"],
            "context": context,
            "children_spec": [plain(child) for child in spec["children_spec"]],
        }

    protocol, spec = json.loads(text)
    return canonical_json([protocol, plain(spec)]).decode("utf-8")
