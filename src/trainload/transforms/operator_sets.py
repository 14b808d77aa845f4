"""The operators of a package's graphs: where they are called, and their decompositions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.decompose import (
    becomes,
    is_core,
    is_device_specific,
    spelled,
)
from trainload.capture.operators import calls_in, is_higher_order, is_overload
from trainload.capture.program import Program
from trainload.core.errors import PassError
from trainload.core.suggestions import did_you_mean
from trainload.packaging.derived import read_derived
from trainload.packaging.graphs.torch_operators import running_schema
from trainload.packaging.package import Package
from trainload.sharding.plans.device_step_graphs import derived_key

STEP = "step"
"""Column of the derived graphs of forward and backward, for the CPU."""
UPDATE = "update"
"""Column of the optimizer's graphs of all groups together."""


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """One operator of a package.

    Attributes:
        name: "aten.linear.default"; for a higher-order operator, "cond".
        schema: schema in the manifest; for an operator that only step graphs call, the running
            torch's; "" for an operator without a schema.
        counts: graph -> number of calls, bodies of control flow included. The keys are captured
            graphs, UPDATE and STEP.
        core: True if torch counts it as core ATen; None if it is not a dispatcher operator.
        device_specific: True if its name names a device.
        becomes: operators into which its calls in captured graphs decompose, in one step; () if it
            has no decomposition.
    """

    name: str
    schema: str
    counts: Mapping[str, int]
    core: bool | None
    device_specific: bool
    becomes: tuple[str, ...]


def operator_uses(package: Package) -> tuple[OperatorUse, ...]:
    """Return every operator of a package's graphs, sorted by name, without functions of sizes
    (`mul` of two lengths).

    Raises:
        PackageError: as `Package.program`.
    """
    program = package.program()
    cpu = torch.device("cpu")
    trained = package.manifest.training_graphs()
    steps = [
        read_derived(package, derived_key(name, cpu)) or derive(program, name, cpu)
        for name in trained
    ]
    modules: list[tuple[str, GraphModule]] = [
        (name, graph.exported.graph_module) for name, graph in program.graphs.items()
    ]
    modules += [
        (UPDATE, exported.graph_module)
        for update in package.updates()
        for exported in (update.first, update.following)
    ]
    modules += [(STEP, step.module) for step in steps]
    counts: dict[str, Counter[str]] = {}
    targets: dict[str, object] = {}
    calls: dict[str, list[Node]] = {}
    for graph, module in modules:
        for node in calls_in(module):
            if not is_overload(node.target) and not is_higher_order(node.target):
                continue
            name = spelled(node.target)
            targets[name] = node.target
            counts.setdefault(name, Counter())[graph] += 1
            if graph in program.graphs:
                calls.setdefault(name, []).append(node)
    return tuple(
        OperatorUse(
            name=name,
            schema=_schema(package, name) if is_overload(targets[name]) else "",
            counts=dict(counts[name]),
            core=is_core(targets[name]) if is_overload(targets[name]) else None,
            device_specific=is_device_specific(targets[name]),
            becomes=next(
                (replacements for node in calls.get(name, ()) if (replacements := becomes(node))),
                (),
            ),
        )
        for name in sorted(targets)
    )


def counts_of(program: Program) -> dict[str, int]:
    """Return operator -> number of calls in all captured graphs, bodies included."""
    calls = (
        node for graph in program.graphs.values() for node in calls_in(graph.exported.graph_module)
    )
    return dict(
        Counter(
            spelled(node.target)
            for node in calls
            if is_overload(node.target) or is_higher_order(node.target)
        )
    )


def outside_core(program: Program) -> tuple[str, ...]:
    """Return the operators of the captured graphs that are outside core ATen, sorted."""
    return tuple(
        sorted(
            {
                spelled(node.target)
                for graph in program.graphs.values()
                for node in calls_in(graph.exported.graph_module)
                if is_overload(node.target) and not is_core(node.target)
            }
        )
    )


def read_operator_file(path: Path) -> tuple[str, ...]:
    """Read the names of operators to decompose, one on each line, with comments after #.

    Raises:
        PassError: there is no such file, or torch has no operator of a name in it.
    """
    if not path.is_file():
        raise PassError(
            "unknown set of operators",
            where=str(path),
            expected="full, core, or a file of operator names",
            hint=did_you_mean(str(path), ("full", "core")),
        )
    names: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if running_schema(f"torch.ops.{name}") is None:
            raise PassError(
                "torch has no such operator",
                where=f"{path}:{number}",
                expected="a name like aten.linear.default",
                got=name,
            )
        names.append(name)
    return tuple(dict.fromkeys(names))


def _schema(package: Package, name: str) -> str:
    full = f"torch.ops.{name}"
    return package.manifest.ops.get(full) or running_schema(full) or ""
