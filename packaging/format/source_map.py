"""debug/source-map.json: the origin of each node of a graph: module, file, line and its text.

    {"files": [[PATH, SHA256 or null], ...], "graphs": {GRAPH: {NODE: [MODULE, FILE or null, LINE,
    TEXT]}}}

FILE is an index into `files`. A node of a body is named NODE/BODY/NODE. Like all of debug/, the map
is not part of the package's identity and may be absent or wrong: nothing depends on it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from trainload.packaging.format.debug import read_debug

NAME = "source-map"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n[ \t]*([^\n]*)')
_STAGES = ("capture", "autograd_trace")
_LIBRARIES = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).resolve().parents[2] / stage) for stage in _STAGES),
    "<",
)
_INSTALLED = tuple(f"trainload/{stage}" for stage in _STAGES)
_MAX_SOURCE = 16 * 2**20
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""Path with which torch marks operators that no module has called."""


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of a node.

    `file` is None if no line of the user's code is known; `unchanged` is True if the file exists
    with the same bytes.
    """

    module: str
    file: str | None
    line: int
    text: str
    unchanged: bool


def module_path(stack: str) -> str:
    """Return the user's module of a serialised `nn_module_stack`: "layers.3"; "" is the model
    itself, or the loss.
    """
    parts = stack.split(";")[-1].split(",")
    return users_path(parts[1]) if len(parts) > 1 else ""


def users_path(path: str) -> str:
    """Return a module path relative to the user's model, which is `model` in the captured
    module.
    """
    return "" if path == "model" else path.removeprefix("model.")


def modules_of(node: Node) -> list[str]:
    """Return the paths of the user's modules in whose calls a node is, outermost first; "" is the
    model itself, or the loss.
    """
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [users_path(str(path)) for path, _ in stack if path != _NO_MODULE]


def make_source_map(
    notes: Mapping[str, Mapping[str, Mapping[str, str]]], recorded_digests: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the document.

    Args:
        notes: graph -> node -> notes of `graph_to_json` on it.
        recorded_digests: file -> sha256 that was recorded when the graph was captured; other files
            are read now.
    """
    files: list[list[str | None]] = []
    numbers: dict[str, int] = {}
    graphs: dict[str, dict[str, list[Any]]] = {}
    for graph, nodes in notes.items():
        graphs[graph] = {}
        for node, node_notes in nodes.items():
            module = module_path(node_notes.get("nn_module_stack", ""))
            frame = _users_frame(node_notes.get("stack_trace", ""))
            if frame is None:
                graphs[graph][node] = [module, None, 0, ""]
                continue
            path, line, text = frame
            if path not in numbers:
                numbers[path] = len(files)
                files.append(
                    [path, recorded_digests[path] if path in recorded_digests else _sha256(path)]
                )
            graphs[graph][node] = [module, numbers[path], line, text]
    return {"files": files, "graphs": graphs}


class SourceMap:
    """The origins of a package's nodes; empty if the package does not have them."""

    def __init__(self, root: Path) -> None:
        document = read_debug(root, NAME)
        self.files: dict[str, str | None] = {}
        self._graphs: dict[str, dict[str, Place]] = {}
        try:
            listed = (
                [(str(path), digest) for path, digest in document["files"]]
                if document is not None
                else []
            )
            self.files = dict(listed)
            same = {path: digest is not None and _sha256(path) == digest for path, digest in listed}
            for graph, nodes in document["graphs"].items() if document is not None else ():
                self._graphs[graph] = {
                    node: (
                        Place(str(module), None, 0, "", False)
                        if number is None
                        else Place(
                            str(module),
                            _printable(listed[number][0]),
                            int(line),
                            _printable(str(text)),
                            same[listed[number][0]],
                        )
                    )
                    for node, (module, number, line, text) in nodes.items()
                }
        except (TypeError, ValueError, LookupError, AttributeError):
            # not a document of this format
            self.files, self._graphs = {}, {}

    def place(self, graph: str, node: str) -> Place | None:
        """Return the origin of a node, or None if unknown."""
        return self._graphs.get(graph, {}).get(node)


def restore_traces(root: Path, name: str, exported: ExportedProgram) -> None:
    """Restore stack traces from debug/ on the nodes of a graph that was read from a package, so
    that passes can keep them.
    """
    document = read_debug(root, name)
    notes = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(notes, dict):
        return
    for path, node in named_nodes(exported.graph_module):
        note = notes.get(path)
        trace = note.get("stack_trace") if isinstance(note, dict) else None
        if isinstance(trace, str) and node.op == "call_function":
            node.meta["stack_trace"] = trace


def named_nodes(module: GraphModule, prefix: str = "") -> list[tuple[str, Node]]:
    """Return (name in debug/, node) for every node of a graph and its bodies."""
    pairs: list[tuple[str, Node]] = []
    for node in module.graph.nodes:
        pairs.append((prefix + node.name, node))
        for source in node.args if node.op == "call_function" else ():
            body = (
                getattr(module, str(source.target), None)
                if isinstance(source, Node) and source.op == "get_attr"
                else None
            )
            if isinstance(body, GraphModule):
                pairs += named_nodes(body, f"{prefix}{node.name}/{source.target}/")
    return pairs


def users_line(trace: str) -> str:
    """Return the user's line of a stack trace, as "model.py:12: y = x.amin(1)", or ""."""
    frame = _users_frame(trace)
    return "" if frame is None else f"{_printable(frame[0])}:{frame[1]}: {_printable(frame[2])}"


def _users_frame(trace: str) -> tuple[str, int, str] | None:
    """Return the innermost frame outside torch and this library's tracing."""
    for path, line, text in reversed(_FRAME.findall(trace)):
        if not path.startswith(_LIBRARIES) and not any(stage in path for stage in _INSTALLED):
            return path, int(line), text.strip()
    return None


def _printable(text: str) -> str:
    """Replace control characters, which a terminal might interpret, with "?"."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _sha256(path: str) -> str | None:
    try:
        file = Path(path)
        # an untrusted package may name any path
        if not file.is_file() or file.stat().st_size > _MAX_SOURCE:
            return None
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
