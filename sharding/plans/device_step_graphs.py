"""Load a package's step graphs for a kind of device, or derive them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.program import Program
from trainload.packaging.derived import cache_derived, read_derived
from trainload.packaging.format.source_map import restore_traces, users_line
from trainload.packaging.package import Package

DERIVATION = 6
"""Part of every derived graph's key: increase it whenever the same program yields other step
graphs.
"""


def derived_key(graph: str, device: torch.device) -> str:
    """Return the name under which a package stores the step graph of one of its graphs, for a kind
    of device and this torch version.

    For GPUs torch chooses the operators of attention by the architecture, and by whether they must
    be deterministic.
    """
    kind = device.type
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind += f"-{major}.{minor}{'-deterministic' if _must_be_deterministic() else ''}"
    return f"{graph}-{kind}-torch{torch.__version__}-{DERIVATION}"


def _must_be_deterministic() -> bool:
    """Return True within `launching.node.determinism.deterministic`."""
    return torch.are_deterministic_algorithms_enabled()


def step_graphs(
    package: Package, device: torch.device, names: Iterable[str] | None = None
) -> dict[str, StepGraph]:
    """Return the step graphs of a package by the names of its graphs.

    Graphs derived for a package that came from a store are kept in the node's cache. For other
    packages only those are stored that a freeze wrote: the training graphs'.

    Args:
        package: the package.
        device: device that the graphs are for.
        names: names of the graphs; None for all that are called in training or evaluation.
    """
    graphs: dict[str, StepGraph] = {}
    program: Program | None = None
    for name in package.manifest.step_graphs() if names is None else names:
        key = derived_key(name, device)
        step = read_derived(package, key)
        if step is None:
            program = program or package.program()
            step = derive(program, name, device, is_deterministic=_must_be_deterministic())
            # it is in the node's cache, whose next release has the same program
            if package.source is not None:
                cache_derived(package, key, step)
        graphs[name] = step
    return graphs


def sourced_step_graphs(
    package: Package, device: torch.device, names: Iterable[str] | None = None
) -> dict[str, StepGraph]:
    """Return the same graphs as `step_graphs`, whose nodes have the stack trace and the modules of
    the captured operators, as far as the package has them.

    They are derived again, and may have other names for their nodes than stored ones.
    """
    graphs: dict[str, StepGraph] = {}
    program = package.program()
    for name in package.manifest.step_graphs() if names is None else names:
        restore_traces(package.path, name, program.graphs[name].exported)
        graphs[name] = derive(
            program, name, device, sources=True, is_deterministic=_must_be_deterministic()
        )
    return graphs


def places_in_step(package: Package, graph: str, device: torch.device) -> dict[str, str]:
    """Return the user's line that each node of a step graph comes from, such as "model.py:12: y =
    x.amin(1)".

    Nodes without a known line are left out. The graph is derived again for this.

    Args:
        package: the package.
        graph: a name in `Manifest.step_graphs`.
        device: as in `step_graphs`.
    """
    step = sourced_step_graphs(package, device, [graph])[graph]
    lines = {
        node.name: users_line(str(node.meta.get("stack_trace", "")))
        for node in step.module.graph.nodes
    }
    return {name: line for name, line in lines.items() if line}
