"""The graphs that a rank runs: a package's step graphs as its plan cuts and rewrites them, and the updates."""

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
    """What a rank runs.

    Attributes:
        ranks: rank graphs by name: `train_name`, `stage_name`, or that of a graph without gradients.
        updates: what `UpdateStep.trace` gives, by the first training graph that shares it.
        cuts: under a plan with a pipeline, how each graph was cut.
    """

    ranks: dict[str, RankGraph]
    updates: dict[str, GraphModule]
    cuts: Mapping[str, Stages]

    def collectives(self, plan: Plan) -> dict[str, tuple[Collective, ...]]:
        """What has to be the same on ranks that meet, by the name of a graph or of a part of it: what each graph calls, that it is the
        graph which other rows and other shares are given, and what crosses the boundaries of those that were cut.
        """
        modules = {name: graph.module for name, graph in self.ranks.items()}
        modules |= {update_name(owner): module for owner, module in self.updates.items()}
        return calls_of(modules, plan) | {f"{name}.messages": _messages(stages) for name, stages in self.cuts.items()}


def calls_of(modules: Mapping[str, GraphModule], plan: Plan) -> dict[str, tuple[Collective, ...]]:
    """What graphs call, by name; and by name with ".graph", which graph that is: ranks of one place in the pipeline have the same."""
    groups = plan.groups()
    found = {name: collectives_of(module, groups, name) for name, module in modules.items()}
    alike = [group for group in (DATA, TENSOR) if group in groups]
    digests = {name: graph_digest(module) for name, module in modules.items()}
    return found | {f"{name}.graph": tuple(Collective("graph", g, "sha256", digest) for g in alike) for name, digest in digests.items()}


def _messages(stages: Stages) -> tuple[Collective, ...]:
    """What crosses the boundaries, in order: the same on all ranks of a pipeline, or they would wait for one another."""
    return tuple(
        Collective(f"{kind} {boundary}", PIPELINE, value.dtype, f"{value.name} {value.shape}")
        for kind, boundaries in (("up from stage", stages.up), ("down to stage", stages.down))
        for boundary, values in enumerate(boundaries)
        for value in values
    )


def train_name(graph: str, phase: Phase) -> str:
    """The name of a training graph for one phase of a step."""
    return f"{graph}.{phase.value}"


def stage_name(graph: str, stage: int, part: Part) -> str:
    """The name of what a stage does of a graph."""
    return f"{graph}.stage{stage}.{part.value}"


def update_name(graph: str) -> str:
    """The name of the update that follows a training graph."""
    return f"{graph}.update"


def update_owners(package: Package) -> dict[str, str]:
    """Training graph -> the first one that updates the same groups in the same way."""
    first: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in package.manifest.training_graphs():
        owners[name] = first.setdefault(package.recipe.graph(name).model_dump_json(), name)
    return owners


def phases(plan: Plan) -> tuple[Phase, ...]:
    """The phases of a step that a plan needs."""
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
    """Rewrites a package's step graphs for the ranks of a plan.

    Args:
        package: what is trained.
        plan: how.
        local: its step graphs by name, as `local_step` gives them for this plan.
        updates: its optimizers' updates.
        device: where the ranks compute.
        pipeline_index: of the ranks.
        cuts: what `cuts_of` gives for these graphs; None: they are cut now.
    """
    training = package.manifest.training_graphs()
    cuts = cuts_of(plan, local) if cuts is None else cuts
    graphs: dict[str, RankGraph] = {}
    for name, step in local.items():
        groups = package.recipe.graph(name).groups if name in training else None
        if plan.pipeline is not None:
            parts = _own_parts(cuts[name], plan, pipeline_index)
            graphs |= {stage_name(name, *key): rewrite(part, plan, Phase.ACCUMULATE, groups) for key, part in parts.items()}
        elif name in training:
            graphs |= {train_name(name, phase): rewrite(step, plan, phase, groups) for phase in phases(plan)}
        else:
            graphs[name] = rewrite(step, plan)
    owners = dict.fromkeys(update_owners(package).values())
    traced = {o: UpdateStep(plan, updates, package.recipe, o, pipeline_index=pipeline_index).trace(device) for o in owners}
    return RankGraphs(graphs, traced, cuts)


def cuts_of(plan: Plan, local: Mapping[str, StepGraph]) -> dict[str, Stages]:
    """Return the stages of step graphs by name; none where the plan has no pipeline."""
    return {name: cut_for(step, plan) for name, step in local.items()} if plan.pipeline is not None else {}


def _own_parts(stages: Stages, plan: Plan, pipeline_index: int) -> dict[tuple[int, Part], StepGraph]:
    """The parts that a rank of the pipeline calls: of backward, the whole of it or its two halves, as the order has it."""
    assert plan.pipeline is not None
    called = {(action.stage, action.part) for action in map(Action.parse, plan.pipeline.order[pipeline_index])}
    return {key: part for key, part in stages.parts.items() if key in called}
