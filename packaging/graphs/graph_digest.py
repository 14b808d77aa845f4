"""Digest of captured graphs that are not in a package."""

from __future__ import annotations

from trainload.capture.program import Program
from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.packaging.graphs.graph_json import graph_to_json


def graphs_digest(program: Program) -> str:
    """Return the sha256, in hex, of the canonical JSON of a program's graphs, name -> graph
    file.
    """
    graphs = {
        name: graph_to_json(graph.exported, name).document for name, graph in program.graphs.items()
    }
    return sha256_bytes(canonical_json(graphs))
