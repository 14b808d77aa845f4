"""Build the graphs that all ranks of a plan would run, on one machine and without data, and check
that their collectives match.

Ranks that differ only in rows and shares have the same graph, so only one rank of each place in the
pipeline takes time; further ranks cost almost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainload.capture.job.ambient import neutrally
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import Collective, check_agreement
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import Plan
from trainload.sharding.rewriting.local_step import Local
from trainload.sharding.rewriting.rank_graphs import RankGraphs, cuts_of, rank_graphs

Calls = Mapping[str, Sequence[Collective]]
"""Result of `RankGraphs.collectives` for one rank."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The graphs that the ranks of a plan would run.

    Attributes:
        plan: the plan.
        ranks: graphs of each pipeline rank, in order; of one rank if there is no pipeline.
        calls: collectives of the same ranks.
    """

    plan: Plan
    ranks: tuple[RankGraphs, ...]
    calls: tuple[Calls, ...]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return group -> operator -> number of its calls in the graphs of all pipeline ranks
        together.
        """
        counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for calls in self.calls:
            for called in calls.values():
                for each in called:
                    if each.is_called:
                        counts[each.group][each.operator] += 1
        return {
            group: dict(sorted(operators.items())) for group, operators in sorted(counts.items())
        }


@neutrally
def simulate(package: Package | Source, plan: Plan, *, training_only: bool = False) -> Simulation:
    """Make the graphs of every rank of a plan, and check that their collectives match.

    Args:
        package: the plan's package.
        plan: the plan.
        training_only: True to leave out graphs without gradients.

    Raises:
        PlanError: the plan is not for the package, a graph cannot be made, or ranks would deadlock.

    Example:
        cluster = trainload.Cluster(nodes=512, devices_per_node=8)
        plan = trainload.plan(package, cluster, "zero3", global_batch=8192)
        print(trainload.simulate(package, plan))
    """
    source = package if isinstance(package, Source) else Source(package)
    check_plan(plan, source.package)
    local = source.local(
        Local.of(plan), source.package.manifest.training_graphs() if training_only else None
    )
    shared_args = source.package, plan, local, source.updates, source.device
    cuts = cuts_of(plan, local)
    ranks = tuple(rank_graphs(*shared_args, index, cuts) for index in range(plan.pipeline_ranks))
    calls = tuple(graphs.collectives(plan) for graphs in ranks)
    check_meeting([calls[plan.pipeline_index(rank)] for rank in range(plan.world_size)], plan)
    return Simulation(plan, ranks, calls)


def check_meeting(everyones: Sequence[Calls], plan: Plan) -> None:
    """Check that the collectives of all ranks of a plan match in every graph, so that no rank hangs
    or receives another value.

    Args:
        everyones: collectives of each rank, by rank, from `RankGraphs.collectives`.
        plan: the plan.

    Raises:
        PlanError: two ranks differ; the message names them and the first difference.
    """
    groups = plan.groups()
    for name in dict.fromkeys(
        name for calls in {id(calls): calls for calls in everyones}.values() for name in calls
    ):
        check_agreement([calls.get(name, ()) for calls in everyones], groups, name)
