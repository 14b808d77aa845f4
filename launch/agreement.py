"""Whether all ranks will call the same collectives: asked of their graphs before the first step, where a difference would be a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch.distributed as dist

from trainload.packaging.canonical import canonical_json
from trainload.sharding.collectives import Collective, demand_agreement
from trainload.sharding.plan import Plan


def demand_same_collectives(collectives: Mapping[str, Sequence[Collective]], plan: Plan, control: dist.ProcessGroup) -> None:
    """Compares what this rank's graphs will call with what the others' will. All ranks of `control` call it.

    Args:
        collectives: this rank's, by graph.
        plan: the run's.
        control: all ranks, on a backend of its own.

    Raises:
        PlanError: on every rank, where two of them would wait for one another.
    """
    mine = {name: [list(astuple(each)) for each in called] for name, called in collectives.items()}
    digests = _gathered(hashlib.sha256(canonical_json(mine)).hexdigest(), control)
    if len(set(digests)) == 1:
        return
    everyones: list[dict[str, Any]] = _gathered(mine, control)
    for name in sorted({name for theirs in everyones for name in theirs}):
        ranks = [tuple(Collective(*entry) for entry in theirs.get(name, ())) for theirs in everyones]
        demand_agreement(ranks, plan.groups(), name)


def _gathered(value: Any, control: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(found, value, group=control)
    return found
