"""Choose the pipeline stage of each parameter: as even as the graph allows, with little to send
between stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.node_costs import bytes_of, flops, moved_bytes
from trainload.sharding.pipeline.items import updated_buffers

FLOPS_PER_BYTE = 50.0
"""Operations that take about as long as reading or writing a byte of memory: devices have 10 to
300.
"""
FLOPS_PER_SENT_BYTE = 2000.0
"""Operations that take as long as sending a byte: 100 TFLOP/s, and 50 GB/s."""

Homes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Forward:
    """The divisible part of a step graph's forward.

    Attributes:
        nodes: nodes that have a place, in order.
        needs: each of them -> the parameters and buffers that it needs, directly or through nodes
            computed from such only.
        alone: nodes computed from parameters and buffers only -> those parameters and buffers.
        held: names of all parameters, and of the buffers that have a stage.
    """

    nodes: tuple[Node, ...]
    needs: Mapping[Node, frozenset[str]]
    alone: Mapping[Node, frozenset[str]]
    held: frozenset[str]


def choose_stages(steps: Sequence[StepGraph], count: int) -> Homes:
    """Return the stages that hold each parameter and each buffer whose update depends on
    parameters.

    Args:
        steps: the training graphs, the main one first; a decision for one holds for the later ones.
        count: number of stages.

    Raises:
        PlanError: the graph has too few places at which it could be cut.
    """
    homes = _assign_main(steps[0], count)
    for step in steps[1:]:
        _assign_others(step, homes)
    return homes


def _assign_main(step: StepGraph, count: int) -> Homes:
    forward = _forward_of(step)
    starts = [i for i, node in enumerate(forward.nodes) if forward.needs[node]]
    if len(starts) < count:
        raise PlanError(
            "the graph has fewer places to cut than there are stages",
            where="pipeline",
            expected=f"at most {len(starts)} stages, the number of operators that use parameters",
            got=str(count),
        )
    begins = _boundaries(forward, starts, count)
    stages_by_name: dict[str, set[int]] = {}
    stage = 0
    for position, node in enumerate(forward.nodes):
        while stage + 1 < count and position >= begins[stage]:
            stage += 1
        for name in forward.needs[node]:
            stages_by_name.setdefault(name, set()).add(stage)
    buffers = updated_buffers(step)
    homes = {
        name: (min(stages),) if name in buffers else tuple(sorted(stages))
        for name, stages in stages_by_name.items()
    }
    _add_unread(step, forward, homes)
    return homes


def _add_unread(step: StepGraph, forward: _Forward, homes: Homes) -> None:
    """Assign a stage to parameters and buffers that no placed node reads. A buffer gets that of the
    parameters in its new value.
    """
    _, results = ends(step.module)
    for node, port in zip(results, step.outputs, strict=True):
        if port.role is Role.BUFFER and port.name in forward.held and port.name not in homes:
            stages = [
                homes[name]
                for name in sorted(forward.alone.get(node, frozenset()))
                if name in homes
            ]
            homes[port.name] = (stages[0][0] if stages else 0,)
    for name in sorted(forward.held):
        homes.setdefault(name, (0,))


def _assign_others(step: StepGraph, homes: Homes) -> None:
    """Assign parameters that only this graph has: each to the stage of the values that it is used
    with.
    """
    forward = _forward_of(step)
    at: dict[Node, int] = {}
    for node in forward.nodes:
        stage = max((at[s] for s in node.all_input_nodes if s in at), default=0)
        for name in sorted(forward.needs[node]):
            stage = next((h for h in homes.setdefault(name, (stage,)) if h >= stage), stage)
        at[node] = stage
    _add_unread(step, forward, homes)


def _forward_of(step: StepGraph) -> _Forward:
    placeholders, _ = ends(step.module)
    buffers = set(updated_buffers(step))
    alone: dict[Node, frozenset[str]] = {}
    """Nodes computed from parameters only, and from values that are the same everywhere -> those
    parameters.
    """
    for node, port in zip(placeholders, step.inputs, strict=True):
        has_stage = port.role is Role.PARAMETER or (
            port.role is Role.BUFFER and port.name in buffers
        )
        alone[node] = frozenset({port.name}) if has_stage else frozenset()
    varying = {
        n
        for n, p in zip(placeholders, step.inputs, strict=True)
        if p.role in (Role.BATCH, Role.ROW, Role.SEED, Role.STEP)
    }
    nodes: list[Node] = []
    needs: dict[Node, frozenset[str]] = {}
    for node in step.module.graph.nodes:
        if node.op == "output" or node.name == TANGENT:
            break
        if node.op == "placeholder":
            continue
        sources = node.all_input_nodes
        own = frozenset[str]().union(*(alone[s] for s in sources if s in alone))
        placed = any(s in needs for s in sources)
        if not placed and (not own or not any(s in varying for s in sources)):
            alone[node] = own
            if any(s in varying for s in sources):
                varying.add(node)
            continue
        nodes.append(node)
        needs[node] = own
    parameters = {port.name for port in step.inputs if port.role is Role.PARAMETER}
    return _Forward(tuple(nodes), needs, alone, frozenset(parameters | buffers))


def _boundaries(forward: _Forward, starts: Sequence[int], count: int) -> list[int]:
    """Return the positions at which stages 1, 2, ... begin, such that the slowest stage is as fast
    as possible.
    """
    work = torch.tensor([0.0, *(cost(node) for node in forward.nodes)], dtype=torch.float64).cumsum(
        0
    )
    sent = _crossing(forward) * FLOPS_PER_SENT_BYTE
    edges = torch.tensor([0, *starts[1:], len(forward.nodes)])
    time = work[edges][None, :] - work[edges][:, None] + sent[edges][None, :] + sent[edges][:, None]
    # a stage from one edge to a later one
    time = torch.where(torch.triu(torch.ones_like(time), 1) > 0, time, torch.inf)
    best = time[0]
    chosen: list[Tensor] = []
    for _ in range(count - 1):
        worst = torch.maximum(best[:, None], time)
        best, before = worst.min(0)
        chosen.append(before)
    at = len(edges) - 1
    positions: list[int] = []
    for before in reversed(chosen):
        at = int(before[at])
        positions.append(int(edges[at]))
    return positions[::-1]


def _crossing(forward: _Forward) -> Tensor:
    """Return (nodes + 1,): bytes made before each position that are used from there on."""
    position = {node: i for i, node in enumerate(forward.nodes)}
    change = torch.zeros(len(forward.nodes) + 2, dtype=torch.float64)
    for node, at in position.items():
        last = max((position[user] for user in node.users if user in position), default=at)
        if last > at:
            change[at + 1] += bytes_of(node)
            change[last + 1] -= bytes_of(node)
    return change.cumsum(0)[:-1]


def cost(node: Node) -> float:
    """Return the approximate cost of a forward node and its backward, in operations."""
    return 3 * (flops(node) + FLOPS_PER_BYTE * moved_bytes(node))
