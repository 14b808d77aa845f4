"""Sums of squares of parameters, of their gradients, and of their updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Bucket, Plan
from trainload.sharding.rewriting.rank_update import UPDATE_SCALARS, UpdateStep


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """Computation of a rank's sums. The sums over all ranks are those of the whole parameters.

    Args:
        plan: plan of the run.
        rank: this rank.
        groups: groups of parameters that the update trains.
    """

    plan: Plan
    rank: int
    groups: Collection[str]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the update trains, the same on all ranks."""
        trained = [b for b in self.plan.buckets if b.group_among(self.groups) is not None]
        return tuple(dict.fromkeys(slot.parameter for bucket in trained for slot in bucket.slots))

    def of(self, step: UpdateStep, arguments: Sequence[Tensor]) -> Tensor:
        """Return float64 (parameters, 3) on the CPU: sums of squares over this rank's elements of
        each parameter, of its gradient before clipping, and of the change that an update makes.

        An element that several ranks hold counts on one of them. The update is computed bucket by
        bucket for this, and its results are discarded. All ranks must call it.

        Args:
            step: the update.
            arguments: its arguments, before it writes to them.
        """
        count = len(step.parts)
        params = arguments[UPDATE_SCALARS : UPDATE_SCALARS + count]
        gradients = step.synchronised(
            tuple(arguments[UPDATE_SCALARS + count : UPDATE_SCALARS + 2 * count])
        )
        places = {name: place for place, name in enumerate(self.parameters)}
        rows: list[Tensor] = []
        of_rows: list[int] = []
        results = step.in_turn(*arguments)
        next(results)  # norm and loss scale
        seen: set[str] = set()
        for part, param, gradient, (new, *_) in zip(
            step.parts, params, gradients, results, strict=True
        ):
            bucket = part.bucket
            if not self._counts(bucket):
                continue
            scaled, change = gradient / arguments[0], new - param
            for name, low, high in parameters_within(self.plan, self.rank, bucket, len(param)):
                values = [_square(value[low:high]) for value in (param, scaled, change)]
                if bucket.name in seen:  # another of its groups: the same elements
                    values[:2] = [torch.zeros_like(values[2])] * 2
                rows.append(torch.stack(values))
                of_rows.append(places[name])
            seen.add(bucket.name)
        sums = torch.zeros(len(places), 3, dtype=torch.float64)
        if rows:
            sums.index_add_(0, torch.tensor(of_rows), torch.stack(rows).cpu())
        return sums

    def _counts(self, bucket: Bucket) -> bool:
        """Return True if this rank is the first of those with the same elements of a bucket."""
        plan, rank = self.plan, self.rank
        data = plan.data_index(rank)
        is_first_copy = data < plan.shard_degree if plan.shards_state else data == 0
        is_first_share = bucket.divided or plan.tensor_index(rank) == 0
        is_first_holder = plan.holders(bucket)[0] == plan.pipeline_index(rank)
        return is_first_copy and is_first_share and is_first_holder


def _square(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return torch.dot(flat, flat).double()
