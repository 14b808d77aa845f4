"""Compare copies of parameters that several ranks hold and must keep equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Plan

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class UnequalCopies:
    """A parameter of which ranks hold unequal copies.

    Attributes:
        parameter: its name.
        ranks: the ranks by value, the most frequent value first.
    """

    parameter: str
    ranks: tuple[tuple[int, ...], ...]


def checksums_of(plan: Plan, rank: int, params: Mapping[str, Tensor]) -> dict[str, int]:
    """Return parameter -> sum of the bits of its elements that a rank stores, as integers.

    Args:
        plan: plan of the run.
        rank: the rank.
        params: bucket -> flat tensor that the rank stores.
    """
    sums: dict[str, Tensor] = {}
    for bucket in plan.held_buckets(plan.pipeline_index(rank)):
        stored = params[bucket.name]
        bits = stored.detach().view(_INTEGERS[stored.itemsize])
        for name, low, high in parameters_within(plan, rank, bucket, len(stored)):
            sums[name] = bits[low:high].sum(dtype=torch.int64)
    values = torch.stack(list(sums.values())).tolist() if sums else []  # one copy from the device
    return dict(zip(sums, values, strict=True))


def unequal_copies(plan: Plan, sums: Sequence[Mapping[str, int]]) -> Iterator[UnequalCopies]:
    """Yield the parameters whose copies differ.

    Args:
        plan: plan of the run.
        sums: checksums of each rank.
    """
    for bucket in plan.buckets:
        for slot in bucket.slots:
            copies: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(
                lambda: defaultdict(list)
            )
            for rank, each in enumerate(sums):
                if slot.parameter in each:
                    share = plan.shard_index(rank) if plan.shards_parameters else 0
                    divided = plan.tensor_index(rank) if bucket.divided else 0
                    copies[share, divided][each[slot.parameter]].append(rank)
            for by_value in copies.values():
                if len(by_value) > 1:
                    groups = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))
                    yield UnequalCopies(slot.parameter, tuple(map(tuple, groups)))


def warning_of(unequal: Sequence[UnequalCopies], step: int) -> dict[str, Any]:
    """Return the data of a run's warning about unequal copies.

    Args:
        unequal: the parameters.
        step: number of the step before which they were found, from 0.
    """
    first = unequal[0]
    more = f" and of {len(unequal) - 1} more parameters" if len(unequal) > 1 else ""
    groups = " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in first.ranks)
    return {
        "message": (
            f"before step {step + 1}, {groups} hold unequal copies of {first.parameter}{more},"
            " which must be equal: memory or a device of one of them is faulty. Find the step with"
            " `trainload debug --compare`, and resume from a checkpoint before it"
        ),
        "step": step,
        "unequal": [asdict(each) for each in unequal],
    }
