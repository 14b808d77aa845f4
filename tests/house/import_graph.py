"""Import graph of the project: `python -m tests.house.import_graph` prints what violates its rules.

Modules do not import each other in cycles, a folder imports only folders before it in `LAYERS`, a
folder has at most `MODULES` modules, and a module at most `LINES` lines. The exit status is 0 if
nothing violates these rules.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import networkx as nx
from tests.house.source import IMPORTED_AS, ROOT, face_files, imports, stage_files

MODULES = 20
"""Maximum number of modules in a folder."""
LINES = 600
"""Maximum length of a module."""
LAYERS = [
    "core",
    "core.storage",
    "capture",
    "capture.source",
    "capture.job",
    "capture.guards",
    "capture.diagnostics",
    "capture.substitutes",
    "capture.initialization",
    "capture.watching",
    "capture.parity",
    "capture.tracing",
    "capture.shapes",
    "autograd_trace",
    "autograd_trace.randomness",
    "autograd_trace.initialization",
    "autograd_trace.recompute",
    "autograd_trace.outlining",
    "autograd_trace.optimizer",
    "autograd_trace.derivation",
    "autograd_trace.compiling",
    "packaging.format",
    "packaging.tensors",
    "packaging.weight_sources",
    "packaging.graphs",
    "packaging.initialization",
    "packaging.libraries",
    "packaging",
    "packaging.comparison",
    "packaging.builds",
    "packaging.signatures",
    "packaging.stores",
    "sharding.plans",
    "sharding.analysis",
    "sharding.tensor",
    "sharding.pipeline",
    "sharding.rewriting",
    "sharding.planner",
    "launching.node",
    "launching.described",
    "launching.checkpoints",
    "launching.settings",
    "launching.run",
    "launching.data",
    "launching.sinks",
    "launching.verification",
    "launching.debugging",
    "launching.profiling",
    "launching.worker",
    "launching.ranks",
    "launching.cluster",
    "launching.doctor",
    "launching.api",
    "freezing",
    "passes",
    "trainer_arguments",
    "huggingface",
    "transforms",
    "exporting",
    "publishing",
    "retraining.config",
    "retraining.data",
    "retraining.ticks",
    "retraining",
    "report.frame",
    "report.runs",
    "report.stores",
    "report.packages",
    "report.plans",
    "report",
    "deploy",
    "cli.view",
    "cli.commands",
    "cli.commands.observing",
    "cli.commands.manifests",
    "cli.commands.setup",
    "cli",
    "__main__",
]
"""Folders and public modules of `trainload`, bottom-up: each may import itself and earlier ones."""


def module_names() -> dict[str, Path]:
    """Return dotted name -> file for every module."""
    names = {}
    for path in stage_files():
        stage, *rest = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(["trainload", IMPORTED_AS[stage], *rest])] = path
    for path in face_files():
        names[
            ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        ] = path
    return names


def import_graph() -> nx.DiGraph[str]:
    """Return the graph of imports, including those inside functions and for type checkers only.

    `trainload` itself is left out: it imports what its public names need on their first use.
    """
    names = {module: path for module, path in module_names().items() if module != "trainload"}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, path in names.items():
        targets = {name for _, name in imports(path.read_text())} & names.keys() - {module}
        graph.add_edges_from((module, target) for target in targets)
    return graph


def cycles(graph: nx.DiGraph[str]) -> list[list[str]]:
    """Return the groups of modules that import each other."""
    return sorted(
        sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1
    )


def layer_of(module: str) -> str | None:
    """Return the layer of a module: its folder, or the module itself.

    None if `LAYERS` has neither.
    """
    name = module.removeprefix("trainload.")
    return next((each for each in (name, name.rpartition(".")[0]) if each in LAYERS), None)


def upward_arrows(graph: nx.DiGraph[str]) -> list[str]:
    """Return "importer imports imported" for each import that violates the order of `LAYERS`.

    Modules without a layer are returned too.
    """
    place = {layer: number for number, layer in enumerate(LAYERS)}
    homeless = [f"{module} is in no layer" for module in graph if layer_of(module) is None]
    arrows = [
        (a, b)
        for a, b in graph.edges
        if place[layer_of(a) or LAYERS[0]] < place[layer_of(b) or LAYERS[0]]
    ]
    return [*homeless, *(f"{importer} imports {imported}" for importer, imported in sorted(arrows))]


def _all_files() -> list[Path]:
    return [*stage_files(), *face_files(), *(ROOT / "tests").rglob("*.py")]


def large_folders() -> dict[str, int]:
    """Return the folders with more than `MODULES` modules, of the product and of the tests."""
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in _all_files()
        if path.name != "__init__.py"
    )
    return {folder: count for folder, count in sorted(counts.items()) if count > MODULES}


def long_modules() -> dict[str, int]:
    """Return the modules with more than `LINES` lines, of the product and of the tests."""
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in _all_files()
    }
    return {name: length for name, length in sorted(lengths.items()) if length > LINES}


def main() -> int:
    graph = import_graph()
    found = [f"cycle: {', '.join(group)}" for group in cycles(graph)]
    found += [f"against the order: {arrow}" for arrow in upward_arrows(graph)]
    found += [
        f"too many modules: {folder} has {count}, at most {MODULES}"
        for folder, count in large_folders().items()
    ]
    found += [
        f"too long: {name} has {length} lines, at most {LINES}"
        for name, length in long_modules().items()
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
