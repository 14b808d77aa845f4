"""The parameters within a rank's part of a bucket."""

from __future__ import annotations

from collections.abc import Iterator

from trainload.sharding.plans.plan import Bucket, Plan


def parameters_within(
    plan: Plan, rank: int, bucket: Bucket, length: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (parameter, first, last + 1) for each parameter with elements in a rank's part.

    Args:
        plan: plan of the run.
        rank: the rank.
        bucket: the bucket.
        length: number of elements of the part: the whole bucket, or the rank's share of it.
    """
    start = 0 if length == bucket.length else plan.shard_index(rank) * length
    for slot in bucket.slots:
        low = max(slot.offset - start, 0)
        high = min(slot.offset + slot.length - start, length)
        if low < high:
            yield slot.parameter, low, high
