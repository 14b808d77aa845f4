"""Collect the statistics of a step, over all ranks, while the step is computed as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from trainload.launching.debugging.activation_sums import Site, Sums, numbers_of
from trainload.launching.debugging.observed_forward import ObservedForwards
from trainload.launching.debugging.replicas import (
    UnequalCopies,
    checksums_of,
    unequal_copies,
)
from trainload.launching.debugging.statistics import (
    Statistics,
    activation_statistics,
    parameter_statistics,
)
from trainload.launching.debugging.update_sums import UpdateSums
from trainload.launching.node.built_graphs import Built
from trainload.launching.node.process_groups import gathered, group_of_stage
from trainload.launching.worker.calls import ignore
from trainload.launching.worker.divergence import Search
from trainload.launching.worker.engine import Engine
from trainload.sharding.rewriting.rank_update import UpdateStep


class StepStatistics:
    """Collector of the statistics of steps.

    Law: a step computes the same bits whether statistics are collected or not.

    Args:
        search: this rank's package, plan and control group. Every rank must create a collector.
        interpreted: interpreted build whose graphs know their source lines (`Search.build`).
        follows_units: True to follow which units are zero in every row; on one rank only, since the
            ranks of a plan may hold different units.
        on_call: called with the name of a graph when its own call begins.

    Attributes:
        unequal: parameters of which ranks held unequal copies when the last collection began.
    """

    def __init__(
        self,
        search: Search,
        interpreted: Built,
        *,
        follows_units: bool = False,
        on_call: Callable[[str], None] = ignore,
    ) -> None:
        self._search, self._on_call = search, on_call
        self._alike = group_of_stage(search.plan, search.rank, search.control)
        self._forwards = ObservedForwards(interpreted, follows_units=follows_units)
        self._turns: list[tuple[str, dict[Site, Sums], Tensor]] = []
        self.unequal: tuple[UnequalCopies, ...] = ()

    @contextmanager
    def collecting(self, engine: Engine) -> Iterator[None]:
        """Collect the statistics of the engine's steps within the context. All ranks must enter
        it.
        """
        plan, search = self._search.plan, self._search
        if search.control is not None:  # one rank has no copies
            sums = gathered(checksums_of(plan, search.rank, engine.held.params), search.control)
            self.unequal = tuple(unequal_copies(plan, sums))
        self._turns, self._forwards.sums = [], {}
        built = engine.built
        engine.built = self._forwards.observing(built, self._on_call)
        engine.before_update = self._take
        try:
            yield
        finally:
            engine.built, engine.before_update = built, None

    def _take(self, step: UpdateStep, arguments: Sequence[Tensor]) -> None:
        sums = self._update_sums(step.name).of(step, arguments)
        self._turns.append((step.name, self._forwards.sums.pop(step.name, {}), sums))

    def _update_sums(self, graph: str) -> UpdateSums:
        groups = self._search.package.recipe.graph(graph).groups
        return UpdateSums(self._search.plan, self._search.rank, groups)

    def collected(self) -> list[tuple[str, Statistics]]:
        """Return (training graph, statistics) of each update that was collected, over all ranks.

        All ranks must call it; the results are the same on all.
        """
        turns = []
        for name, activations, updates in self._turns:
            _reduce(updates, dist.ReduceOp.SUM, self._search.control)
            names = self._update_sums(name).parameters
            statistics = Statistics(
                activation_statistics(self._over_ranks(activations)),
                parameter_statistics(self._search.plan, names, updates),
            )
            turns.append((name, statistics))
        self._turns = []
        return turns

    def _over_ranks(self, own: dict[Site, Sums]) -> dict[Site, Sums]:
        """Return the sums over the ranks that call the same graphs, of all stages of a pipeline."""
        alike = self._alike
        if alike is None:
            return own
        numbers = numbers_of(own.values())
        totals, greatest = numbers[:, :4].contiguous(), numbers[:, 4].contiguous()
        _reduce(totals, dist.ReduceOp.SUM, alike)
        _reduce(greatest, dist.ReduceOp.MAX, alike)
        summed = {
            site: Sums(
                each.line,
                int(count),
                squares,
                most,
                zeros,
                None if each.saturated is None else saturated,
            )
            for (site, each), (count, squares, zeros, saturated), most in zip(
                own.items(), totals, greatest, strict=True
            )
        }
        is_first = dist.get_rank(alike) == 0
        stages = gathered(summed if is_first else {}, self._search.control)
        return {site: each for stage in stages for site, each in stage.items()}


def _reduce(
    value: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Reduce a CPU tensor in place over the ranks of a group; None: over this rank alone."""
    if group is not None and value.numel():
        dist.all_reduce(value, operation, group=group)
