"""The import graph of the project: `python -m tests.house.import_graph` prints its cycles. Exit status 0: it has none."""

from __future__ import annotations

import sys
from pathlib import Path

import networkx as nx
from tests.house.source import IMPORTED_AS, ROOT, face_files, imports, stage_files


def module_names() -> dict[str, Path]:
    """Return each module's dotted name and its file."""
    names = {}
    for path in stage_files():
        stage, *rest = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(["trainload", IMPORTED_AS[stage], *rest])] = path
    for path in face_files():
        names[".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")] = path
    return names


def import_graph() -> nx.DiGraph[str]:
    """Return the graph of modules that import each other, also inside functions and for type checkers alone.

    `trainload` itself is left out: it imports what its public names need on their first use.
    """
    names = module_names()
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, path in names.items():
        targets = {name for _, name in imports(path.read_text())} & names.keys() - {module, "trainload"}
        graph.add_edges_from((module, target) for target in targets)
    return graph


def cycles(graph: nx.DiGraph[str]) -> list[list[str]]:
    """Return the groups of modules that import each other."""
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def main() -> int:
    found = cycles(import_graph())
    for group in found:
        sys.stdout.write(f"cycle: {', '.join(group)}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
