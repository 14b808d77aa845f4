"""Check, before the first step, that all ranks call matching collectives on the same data.

A difference would become a hang, or training on wrong rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import DataError
from trainload.launching.node.process_groups import gathered
from trainload.sharding.analysis.collectives import Collective, as_json, of_json
from trainload.sharding.planner.simulate import check_meeting
from trainload.sharding.plans.plan import Plan


def check_same_collectives(
    collectives: Mapping[str, Sequence[Collective]], plan: Plan, control: dist.ProcessGroup
) -> None:
    """Check that the collectives of this rank's graphs match those of the other ranks.

    All ranks of `control` must call it.

    Args:
        collectives: collectives of this rank, by graph.
        plan: plan of the run.
        control: group of all ranks, on a separate backend.

    Raises:
        PlanError: two ranks would wait for each other; raised on every rank.
    """
    mine = as_json(collectives)
    digests = gathered(sha256_bytes(canonical_json(mine)), control)
    if len(set(digests)) == 1:
        return
    check_meeting([of_json(theirs) for theirs in gathered(mine, control)], plan)


def check_same_data(fingerprint: str, node: str, data: str, control: dist.ProcessGroup) -> None:
    """Check that all ranks have the same rows. All ranks of `control` must call it.

    Args:
        fingerprint: fingerprint of this rank's rows.
        node: node of this rank.
        data: path or URL of the data.
        control: group of all ranks.

    Raises:
        DataError: two ranks have different rows; raised on every rank.
    """
    rank_fingerprints = gathered((fingerprint, node), control)
    if len({each for each, _ in rank_fingerprints}) > 1:
        first = rank_fingerprints[0][0]
        others = sorted({node for each, node in rank_fingerprints if each != first})
        raise DataError(
            "the nodes do not have the same data",
            where=data,
            expected=f"what rank 0 has on node {rank_fingerprints[0][1]}: {first}",
            got=f"different rows on {', '.join(others)}",
            hint="Put it on storage that all nodes share, or copy it again.",
        )
