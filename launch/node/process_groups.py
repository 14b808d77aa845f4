"""Helpers for process groups: gather objects, create the groups of pipeline stages, destroy all
groups.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from trainload.autograd_trace.derivation.named_groups import bound_groups
from trainload.sharding.plans.plan import Plan

T = TypeVar("T")


def gathered(value: T, control: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of `control`, by rank; [value] if it is None.

    All ranks must call it.
    """
    if control is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(values, value, group=control)
    return values


def group_of_stage(
    plan: Plan, rank: int, control: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the group of the ranks that call the same graphs in the same order: all ranks, or
    those with the same pipeline stages.

    Args:
        plan: plan of the run.
        rank: this rank.
        control: group of all ranks, each of which must call this; None if there is one rank.
    """
    if plan.pipeline is None or control is None:
        return control
    groups: list[dist.ProcessGroup] = []
    for index in range(plan.pipeline_ranks):  # torch requires every rank to create every group
        members = [
            member for member in range(plan.world_size) if plan.pipeline_index(member) == index
        ]
        groups.append(dist.new_group(members, backend="gloo"))
    return groups[plan.pipeline_index(rank)]


def abort_groups(names: Iterable[str]) -> None:
    """Release a thread of this process that waits in a collective of NCCL, which raises an error
    there.

    gloo's `abort` releases nobody (torch 2.13). There the error comes when a peer's sockets close,
    which they do when it ends or leaves its groups.

    Args:
        names: names of groups that are bound (`bind_groups`).
    """
    if not dist.is_initialized() or dist.get_backend() != dist.Backend.NCCL:
        return
    for group in {dist.group.WORLD, *bound_groups(names)}:
        if group is not None:
            group.abort()


def leave_groups() -> None:
    """Destroy all of this process's groups, and end their threads.

    torch ends a group's threads when its last reference is dropped, and one may be left in a
    garbage cycle. A gloo thread that is still alive when the interpreter ends, and only then
    releases a tensor, aborts a process that has completed all of its work.
    """
    dist.destroy_process_group()
    gc.collect()
