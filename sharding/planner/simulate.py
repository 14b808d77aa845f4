"""Goes through what all ranks of a plan would run, on one machine and without a value: their graphs, and whether they would meet.

Ranks that differ in rows and shares alone have one graph, so that what takes time is one rank of each place in the pipeline; how many
ranks there are beside it costs next to nothing.
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
"""What `RankGraphs.collectives` gives for one rank."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the ranks of a plan would run.

    Attributes:
        plan: the plan.
        ranks: the graphs of each rank of the pipeline, in order; of one rank, where there is none.
        calls: the same ranks' collectives.
    """

    plan: Plan
    ranks: tuple[RankGraphs, ...]
    calls: tuple[Calls, ...]

    def counts(self) -> dict[str, dict[str, int]]:
        """Group -> operator -> how many calls of it stand in the graphs of the ranks of a pipeline together."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for calls in self.calls:
            for called in calls.values():
                for each in called:
                    if each.is_called:
                        found[each.group][each.operator] += 1
        return {group: dict(sorted(operators.items())) for group, operators in sorted(found.items())}


@neutrally
def simulate(package: Package | Source, plan: Plan, *, training_only: bool = False) -> Simulation:
    """Makes the graphs of every rank of a plan, and demands that they meet.

    Args:
        package: the plan's.
        plan: the plan.
        training_only: leave out graphs without gradients.

    Raises:
        PlanError: the plan is not for the package, a graph cannot be made, or ranks would wait for one another.
    """
    source = package if isinstance(package, Source) else Source(package)
    check_plan(plan, source.package)
    local = source.local(Local.of(plan), source.package.manifest.training_graphs() if training_only else None)
    given = source.package, plan, local, source.updates, source.device
    cuts = cuts_of(plan, local)
    ranks = tuple(rank_graphs(*given, index, cuts) for index in range(plan.pipeline_ranks))
    calls = tuple(graphs.collectives(plan) for graphs in ranks)
    check_meeting([calls[plan.pipeline_index(rank)] for rank in range(plan.world_size)], plan)
    return Simulation(plan, ranks, calls)


def check_meeting(everyones: Sequence[Calls], plan: Plan) -> None:
    """Check that the collectives of all ranks of a plan match in every graph: no rank would wait forever or receive another value.

    Args:
        everyones: what each rank calls, by rank, as `RankGraphs.collectives` tells it.
        plan: the plan.

    Raises:
        PlanError: two ranks differ; it names them, and the first thing in which they do.
    """
    groups = plan.groups()
    for name in dict.fromkeys(name for calls in {id(calls): calls for calls in everyones}.values() for name in calls):
        check_agreement([calls.get(name, ()) for calls in everyones], groups, name)
