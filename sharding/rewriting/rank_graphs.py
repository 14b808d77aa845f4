"""The graphs of a rank: a package's step graphs, cut and rewritten for its plan, and the
updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from trainload.autograd_trace.graphs import StepGraph, UpdateGraph
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import Collective, collectives_of, graph_digest
from trainload.sharding.pipeline.pipeline_axis import cut_for
from trainload.sharding.pipeline.stage_schedule import Action
from trainload.sharding.pipeline.stages import Part, Stages
from trainload.sharding.plans.plan import DATA, PIPELINE, TENSOR, Plan
from trainload.sharding.rewriting.rank_update import UpdateStep
from trainload.sharding.rewriting.rewrite import Phase, RankGraph, rewrite


@dataclass(frozen=True, slots=True)
class RankGraphs:
    """Graphs that a rank runs.

    Attributes:
        ranks: rank graphs by `train_name`, `stage_name`, or the name of a graph without gradients.
        updates: results of `UpdateStep.trace`, by the first training graph that shares it.
        cuts: stages of each graph, in a plan with a pipeline.
    """

    ranks: dict[str, RankGraph]
    updates: dict[str, GraphModule]
    cuts: Mapping[str, Stages]

    def collectives(self, plan: Plan) -> dict[str, tuple[Collective, ...]]:
        """Return everything that must be equal on communicating ranks, by the name of a graph or of
        a part of it.

        This covers the collectives of each graph, the graph itself among ranks that differ only in
        rows and shares, and the messages between the stages of graphs that were cut.
        """
        modules = {name: graph.module for name, graph in self.ranks.items()}
        modules |= {update_name(owner): module for owner, module in self.updates.items()}
        return calls_of(modules, plan) | {
            f"{name}.messages": _messages(stages) for name, stages in self.cuts.items()
        }


def calls_of(modules: Mapping[str, GraphModule], plan: Plan) -> dict[str, tuple[Collective, ...]]:
    """Return the collectives of graphs by name and, under the name with ".graph", the digest of the
    graph: ranks at one place in the pipeline have the same.
    """
    groups = plan.groups()
    calls = {name: collectives_of(module, groups, name) for name, module in modules.items()}
    alike = [group for group in (DATA, TENSOR) if group in groups]
    digests = {name: graph_digest(module) for name, module in modules.items()}
    return calls | {
        f"{name}.graph": tuple(Collective("graph", g, "sha256", digest) for g in alike)
        for name, digest in digests.items()
    }


def _messages(stages: Stages) -> tuple[Collective, ...]:
    """Return the messages between stages, in order. They must be the same on all ranks of a
    pipeline, or the ranks would deadlock.
    """
    return tuple(
        Collective(f"{kind} {boundary}", PIPELINE, value.dtype, f"{value.name} {value.shape}")
        for kind, boundaries in (("up from stage", stages.up), ("down to stage", stages.down))
        for boundary, values in enumerate(boundaries)
        for value in values
    )


def train_name(graph: str, phase: Phase) -> str:
    """Return the name of a training graph for one phase of a step."""
    return f"{graph}.{phase.value}"


def stage_name(graph: str, stage: int, part: Part) -> str:
    """Return the name of a stage's part of a graph."""
    return f"{graph}.stage{stage}.{part.value}"


def update_name(graph: str) -> str:
    """Return the name of the update that follows a training graph."""
    return f"{graph}.update"


def update_owners(package: Package) -> dict[str, str]:
    """Return training graph -> the first one that updates the same groups in the same way."""
    first: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in package.manifest.training_graphs():
        owners[name] = first.setdefault(package.recipe.graph(name).model_dump_json(), name)
    return owners


def phases(plan: Plan) -> tuple[Phase, ...]:
    """Return the phases of a step that a plan needs."""
    return (Phase.ONLY,) if plan.accumulate == 1 else (Phase.ACCUMULATE, Phase.SYNCHRONISE)


def rank_graphs(
    package: Package,
    plan: Plan,
    local: Mapping[str, StepGraph],
    updates: Sequence[UpdateGraph],
    device: torch.device,
    pipeline_index: int = 0,
    cuts: Mapping[str, Stages] | None = None,
) -> RankGraphs:
    """Rewrite a package's step graphs for the ranks of a plan.

    Args:
        package: the package.
        plan: the plan.
        local: its step graphs by name, as `local_step` returns them for this plan.
        updates: its optimizers' updates.
        device: device of the ranks.
        pipeline_index: index of the ranks on the pipeline axis.
        cuts: result of `cuts_of` for these graphs; None to cut them now.
    """
    training = package.manifest.training_graphs()
    cuts = cuts_of(plan, local) if cuts is None else cuts
    graphs: dict[str, RankGraph] = {}
    for name, step in local.items():
        groups = package.recipe.graph(name).groups if name in training else None
        if plan.pipeline is not None:
            parts = _own_parts(cuts[name], plan, pipeline_index)
            graphs |= {
                stage_name(name, *key): rewrite(part, plan, Phase.ACCUMULATE, groups)
                for key, part in parts.items()
            }
        elif name in training:
            graphs |= {
                train_name(name, phase): rewrite(step, plan, phase, groups)
                for phase in phases(plan)
            }
        else:
            graphs[name] = rewrite(step, plan)
    owners = dict.fromkeys(update_owners(package).values())
    traced = {
        o: UpdateStep(plan, updates, package.recipe, o, pipeline_index=pipeline_index).trace(device)
        for o in owners
    }
    return RankGraphs(graphs, traced, cuts)


def cuts_of(plan: Plan, local: Mapping[str, StepGraph]) -> dict[str, Stages]:
    """Return the stages of step graphs by name; {} if the plan has no pipeline."""
    return (
        {name: cut_for(step, plan) for name, step in local.items()}
        if plan.pipeline is not None
        else {}
    )


def _own_parts(
    stages: Stages, plan: Plan, pipeline_index: int
) -> dict[tuple[int, Part], StepGraph]:
    """Return the parts that a pipeline rank calls: of backward, the whole or its two halves,
    according to the order.
    """
    assert plan.pipeline is not None
    called = {
        (action.stage, action.part)
        for action in map(Action.parse, plan.pipeline.order[pipeline_index])
    }
    return {key: part for key, part in stages.parts.items() if key in called}
