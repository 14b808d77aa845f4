"""Find what a tensor axis can divide from the graph alone: hidden features of a feed-forward block,
attention heads, a vocabulary.

Only the model's operators are known. Each class of parameter dims is evaluated by itself: the work
that sharding it saves each rank, and what ranks would have to exchange. Two classes of one
parameter exclude each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape

import torch
from torch.fx import Node

from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.core.errors import PlanError
from trainload.core.suggestions import did_you_mean
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.node_costs import elements, flops
from trainload.sharding.plans.plan import Shard
from trainload.sharding.tensor.factors import Factor
from trainload.sharding.tensor.links import Links
from trainload.sharding.tensor.partition import divisions, linked
from trainload.sharding.tensor.positions import data_factors

aten = torch.ops.aten
WORTH = 8
"""Operations that must be saved for each exchanged element: with fewer, no link is fast enough."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class of dims that could be divided.

    Attributes:
        factor: the class.
        shards: division of the parameters that have it.
        flops: operations of a step that each rank saves.
        exchanged: elements that ranks exchange.
        parameters: elements of the parameters that have it.
        experts: True if it numbers matrices of a batched product, one per expert.
    """

    factor: Factor
    shards: Mapping[str, Shard]
    flops: float
    exchanged: float
    parameters: int
    experts: bool = False

    @property
    def worth(self) -> float:
        """Operations saved for each exchanged element."""
        return self.flops / max(self.exchanged, 1.0)

    @property
    def pays(self) -> bool:
        """True if the division saves enough work or memory."""
        return self.worth > WORTH or self.parameters > self.exchanged


def choose(
    steps: Sequence[StepGraph],
    ranks: int,
    whole: Collection[str] = (),
    rules: Mapping[str, Shard | None] | None = None,
) -> dict[str, Shard]:
    """Return which parameters a tensor axis divides, and how.

    Args:
        steps: the training graphs, the main one first; a decision for one holds for the later ones.
        ranks: ranks of the axis.
        whole: parameters that every rank needs whole.
        rules: pattern of parameter names (as in a shell) -> their division; None to leave them
            whole. The first match counts.

    Raises:
        PlanError: a rule's parameter cannot be divided so, or no parameter matches the pattern.
    """
    requested = _match_rules(steps, dict(rules or {}))
    for name in whole:
        if requested.get(name) is not None:
            raise PlanError(
                "a parameter's optimizer needs it whole",
                where=name,
                expected="a rule that leaves it whole",
                got=str(requested[name]),
            )
    decided: dict[str, Shard | None] = {**requested, **dict.fromkeys(whole)}
    for step in steps:
        chosen = _choose_one(step, ranks, decided)
        for port in step.inputs:
            if port.role is Role.PARAMETER:
                decided.setdefault(port.name, chosen.get(port.name))
    return {name: shard for name, shard in decided.items() if shard is not None}


def experts(
    steps: Sequence[StepGraph], ranks: int, whole: Collection[str] = ()
) -> dict[str, Shard]:
    """Return the division of the parameters of experts, and of no others. The arguments are those
    of `choose`.
    """
    shards = {
        name: shard
        for step in steps
        for each in candidates(step, ranks)
        if each.experts
        for name, shard in each.shards.items()
    }
    rules: dict[str, Shard | None] = {
        escape(name): shard for name, shard in shards.items() if name not in whole
    }
    return choose(steps, ranks, whole, {**rules, "*": None}) if rules else {}


def _match_rules(
    steps: Sequence[StepGraph], rules: Mapping[str, Shard | None]
) -> dict[str, Shard | None]:
    names = dict.fromkeys(
        port.name for step in steps for port in step.inputs if port.role is Role.PARAMETER
    )
    requested: dict[str, Shard | None] = {}
    for pattern, shard in rules.items():
        fits = [name for name in names if fnmatchcase(name, pattern)]
        if not fits:
            raise PlanError(
                "a rule of the tensor axis matches no parameter",
                where=pattern,
                expected=f"one of {', '.join(list(names)[:20])}",
                hint=did_you_mean(pattern, names),
            )
        for name in fits:
            requested.setdefault(name, shard)
    return requested


def _choose_one(
    step: StepGraph, ranks: int, decided: Mapping[str, Shard | None]
) -> dict[str, Shard]:
    by_worth = candidates(step, ranks)
    by_worth.sort(key=lambda each: -each.worth)
    requested = [
        c for c in by_worth if any(decided.get(name) == shard for name, shard in c.shards.items())
    ]
    chosen: dict[str, Shard] = {}
    for candidate in [*requested, *by_worth]:
        free = all(
            name not in chosen and decided.get(name, shard) == shard
            for name, shard in candidate.shards.items()
        )
        if free and (candidate in requested or candidate.pays):
            chosen.update(candidate.shards)
    missing = sorted(
        n
        for n, s in decided.items()
        if s is not None and chosen.get(n) != s and any(p.name == n for p in step.inputs)
    )
    if missing:
        raise PlanError(
            "a parameter cannot be divided as requested",
            where=missing[0],
            expected="; ".join(
                str(c.shards[missing[0]]) for c in by_worth if missing[0] in c.shards
            )
            or "none: the graph does not allow dividing it",
            got=str(decided[missing[0]]),
        )
    return chosen


def candidates(step: StepGraph, ranks: int) -> list[Candidate]:
    """Return every class of dims of a graph's parameters that `ranks` ranks could share."""
    links = linked(step)
    placeholders, _ = ends(step.module)
    inputs = dict(zip(placeholders, step.inputs, strict=True))
    batch = data_factors(links, inputs)
    repeated = _repeated_factors(links)
    shards: dict[Factor, dict[str, Shard]] = {}
    counts: dict[Factor, int] = {}
    for node, port in inputs.items():
        if port.role is not Role.PARAMETER:
            continue
        for leaf, shard in divisions(links, node, ranks):
            if leaf not in batch and leaf not in repeated:
                shards.setdefault(leaf, {})[port.name] = shard
                counts[leaf] = counts.get(leaf, 0) + math.prod(node.meta["val"].shape)
    saved: dict[Factor, float] = dict.fromkeys(shards, 0.0)
    exchanged: dict[Factor, float] = dict.fromkeys(shards, 0.0)
    for node, use in links.uses.items():
        work = flops(node)
        present = {
            f for dims in links.touched(node) for dim in dims for f in links.factors.leaves(dim)
        } & shards.keys()
        whole, special = (
            set(links.factors.leaves(use.whole)),
            set(links.factors.leaves(use.special)),
        )
        for factor in present:
            if factor in whole:
                exchanged[factor] += sum(
                    elements(s.meta["val"])
                    for s in node.all_input_nodes
                    if links.has_dims(s) and links.holds(links.dims(s), factor)
                )
                continue
            saved[factor] += work * (ranks - 1) / ranks
            values = (
                node.meta["val"]
                if isinstance(node.meta["val"], tuple | list)
                else (node.meta["val"],)
            )
            for value, contracted in zip(values, use.contracted, strict=False):
                if factor in links.factors.leaves(contracted):
                    exchanged[factor] += elements(value)
            if factor in special and not any(
                links.holds(dims, factor) for dims in links.outputs[node]
            ):
                exchanged[factor] += elements(node.meta["val"])
    expert_factors = _expert_factors(links, inputs)
    return [
        Candidate(f, own, saved[f], exchanged[f], counts[f], f in expert_factors)
        for f, own in shards.items()
    ]


def _expert_factors(links: Links, inputs: Mapping[Node, Port]) -> set[Factor]:
    """Return the factors that number the matrices of a parameter and of a batched product:
    experts.
    """
    products = [
        node for node in links.uses if node.target in (aten.bmm.default, aten.baddbmm.default)
    ]
    batches = {
        f
        for node in products
        for dims in links.outputs[node]
        for f in links.factors.leaves((dims or ((),))[0])
    }
    stacks = [
        links.dims(n)[0]
        for n, p in inputs.items()
        if p.role is Role.PARAMETER and n.meta["val"].ndim > 2
    ]
    return batches.intersection(f for dim in stacks for f in links.factors.leaves(dim))


def _repeated_factors(links: Links) -> set[Factor]:
    """Return the factors that some value has more than once: a share of one would not be a share of
    the other.
    """
    repeated: set[Factor] = set()
    for outputs in links.outputs.values():
        for dims in outputs:
            seen: set[Factor] = set()
            for dim in dims or ():
                for leaf in links.factors.leaves(dim):
                    (repeated if leaf in seen else seen).add(leaf)
    return repeated
