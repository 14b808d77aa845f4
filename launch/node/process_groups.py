"""The process groups that ranks talk in: what each of them has, and how they are left."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

import torch.distributed as dist

from trainload.sharding.plans.plan import Plan

T = TypeVar("T")


def gathered(value: T, control: dist.ProcessGroup | None) -> list[T]:
    """What every rank of `control` has, by rank. All of them call it. `control` None: there is one rank."""
    if control is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(found, value, group=control)
    return found


def group_of_stage(plan: Plan, rank: int, control: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of the ranks that call the same graphs in the same order: all ranks, or those with the same pipeline stages.

    Args:
        plan: the run's plan.
        rank: this rank.
        control: the group of all ranks, each of which must call this; None: there is one rank.
    """
    if plan.pipeline is None or control is None:
        return control
    groups: list[dist.ProcessGroup] = []
    for index in range(plan.pipeline_ranks):  # every rank makes every group
        members = [each for each in range(plan.world_size) if plan.pipeline_index(each) == index]
        groups.append(dist.new_group(members, backend="gloo"))
    return groups[plan.pipeline_index(rank)]


def leave_groups() -> None:
    """Ends all of this process's groups, and their threads.

    torch ends a group's threads with the last reference to it, and one may be left in garbage. Of gloo, a thread that is still there when
    the interpreter ends, and drops a tensor only then, aborts a process that has done all of its work.
    """
    dist.destroy_process_group()
    gc.collect()
