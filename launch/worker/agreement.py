"""Whether all ranks will call the same collectives, on the same data: asked before the first step, where a difference would be a hang, or
steps on rows that nobody meant.
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


def check_same_collectives(collectives: Mapping[str, Sequence[Collective]], plan: Plan, control: dist.ProcessGroup) -> None:
    """Compares what this rank's graphs will call with what the others' will. All ranks of `control` call it.

    Args:
        collectives: this rank's, by graph.
        plan: the run's.
        control: all ranks, on a backend of its own.

    Raises:
        PlanError: on every rank, where two of them would wait for one another.
    """
    mine = as_json(collectives)
    digests = gathered(sha256_bytes(canonical_json(mine)), control)
    if len(set(digests)) == 1:
        return
    check_meeting([of_json(theirs) for theirs in gathered(mine, control)], plan)


def check_same_data(fingerprint: str, node: str, data: str, control: dist.ProcessGroup) -> None:
    """Compares the rows that this rank has with the others'. All ranks of `control` call it.

    Args:
        fingerprint: of this rank's.
        node: where this rank is.
        data: what the rows are of.
        control: all ranks.

    Raises:
        DataError: on every rank, where two of them have other rows.
    """
    found = gathered((fingerprint, node), control)
    if len({each for each, _ in found}) > 1:
        first = found[0][0]
        others = sorted({node for each, node in found if each != first})
        raise DataError(
            "the nodes do not have the same data",
            where=data,
            expected=f"what rank 0 has on node {found[0][1]}: {first}",
            got=f"other rows on {', '.join(others)}",
            hint="Put it on storage that all nodes share, or copy it again.",
        )
