"""The ranks of a plan by the axes of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainload.sharding.plans.plan import Plan

_MOST_CELLS = 4_096
_FIRST_ROWS = 12
"""Rows of a table that are visible before it is opened."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of ranks: its title, the nodes that they are on, and the ranks."""

    title: str
    nodes: str
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks at one place of the pipeline.

    Attributes:
        title: title of the table.
        corner: title of the first column.
        columns: titles of the columns of ranks.
        first: the first rows.
        others: rows to open; together with all other grids of a page, few enough.
        left_out: number of rows that are not in the page.
    """

    title: str
    corner: str
    columns: Sequence[str]
    first: Sequence[Row]
    others: Sequence[Row]
    left_out: int


def grids_of(plan: Plan) -> list[Grid]:
    """Return a grid for each place of the pipeline: one column for each tensor rank or, without a
    tensor axis, for each rank of a copy or of a node.
    """
    pipeline, data, tensor = plan.pipeline_ranks, plan.data_ranks, plan.tensor_ranks
    most_rows = _MOST_CELLS // pipeline
    grids = []
    for place in range(min(pipeline, _MOST_CELLS)):
        first = place * data * tensor
        lane = range(first, first + data * tensor)
        if tensor > 1:
            width, kind, columns = tensor, "data", [f"tensor {at}" for at in range(tensor)]
        elif plan.replicas > 1 and plan.shard_degree > 1:
            width, kind = plan.shard_degree, "copy"
            columns = [f"shard {at}" for at in range(width)]
        else:
            devices = plan.cluster.devices_per_node
            width = min(devices, len(lane))
            is_aligned = len(lane) % devices == 0
            kind = "node" if is_aligned else "row"
            columns = [f"device {at}" if is_aligned else f"+{at}" for at in range(width)]
        parts = enumerate(lane[at : at + width] for at in range(0, len(lane), width))
        rows = [
            Row(_nodes(plan, ranks), "", ranks)
            if kind == "node"
            else Row(f"{kind} {number}", _nodes(plan, ranks), ranks)
            for number, ranks in parts
        ]
        kept = rows[: max(1, most_rows // width)]
        stages = f", stages {', '.join(map(str, _stages(plan, place)))}" if plan.pipeline else ""
        title = f"pipeline rank {place}{stages}" if pipeline > 1 else "all ranks"
        grids.append(
            Grid(
                title,
                kind,
                columns,
                kept[:_FIRST_ROWS],
                kept[_FIRST_ROWS:],
                len(rows) - len(kept),
            )
        )
    return grids


def _stages(plan: Plan, place: int) -> list[int]:
    assert plan.pipeline is not None
    return [stage for stage, rank in enumerate(plan.pipeline.stage_ranks) if rank == place]


def _nodes(plan: Plan, ranks: Sequence[int]) -> str:
    first, last = (rank // plan.cluster.devices_per_node for rank in (ranks[0], ranks[-1]))
    return f"node {first}" if first == last else f"nodes {first}-{last}"
