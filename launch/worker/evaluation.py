"""Evaluation of what a rank holds on held-out data: every row once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainload.core.errors import DataError
from trainload.launching.data.run_data import OpenPart, RunData
from trainload.launching.data.sampler import sequential
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Engine
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What held-out rows were evaluated to.

    Attributes:
        loss: the main graph's.
        metrics: its metrics, and the other graphs' losses and metrics as "graph.name".
        rows: that were evaluated.
        parts: the same of each part of the data that has a name.
    """

    loss: float
    metrics: dict[str, float]
    rows: int
    parts: Mapping[str, Evaluated] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What the journal has of it."""
        parts = {"parts": {name: part.as_json() for name, part in self.parts.items()}} if self.parts else {}
        return {"loss": self.loss, "metrics": self.metrics, "rows": self.rows, **parts}


class Evaluation:
    """A rank's part in evaluating a run. All ranks call it at the same time.

    Args:
        engine: what is evaluated.
        package: what is trained.
        plan: how.
        rank: this rank.
        data: the held-out data. where: what it is called in errors.
        batches: at most so many global batches of each of its parts; None: all.
        mean: whether the running mean of the parameters is evaluated, once there is one.
    """

    def __init__(
        self, engine: Engine, package: Package, plan: Plan, rank: int, data: RunData, where: str, *, batches: int | None, mean: bool
    ) -> None:
        self._engine, self._package, self._plan, self._rank = engine, package, plan, rank
        self._data, self._where, self._batches, self._mean = data, where, batches, mean

    def __call__(self) -> Evaluated:
        """Evaluate all of the data, and each part that has a name and whose weight is not 0.

        Raises:
            DataError: there are too few rows for one batch, or the weight of all of them is 0.
        """
        totals: dict[str, Tensor] = {}
        rows = 0
        parts: dict[str, Evaluated] = {}
        with self._engine.averaged() if self._mean else nullcontext():
            for number, part in enumerate(self._data.parts):
                own: dict[str, Tensor] = {}
                count = 0
                for microbatch, share, of_all in self._microbatches(number, part):
                    count += of_all
                    for graph, found in self._engine.evaluate(microbatch, part.variant).items():
                        weighed = found.double().cpu() * share
                        for sums in (totals, own):
                            sums[graph] = sums[graph] + weighed if graph in sums else weighed
                rows += count
                if part.name is not None and own and all(values[-1] for values in own.values()):
                    parts[part.name] = self._evaluated(own, count)
        if not totals:
            raise DataError("the held-out data has too few rows for one batch", where=self._where)
        for graph, values in totals.items():
            if not values[-1]:
                raise DataError(
                    f"the weight of the {rows} held-out rows that were evaluated is 0, so their loss has no mean",
                    where=f"{self._where}, graph {graph}",
                    expected="rows that the loss counts: labels that are not all ignored, or a mask that is not all 0",
                    got="a weight of 0",
                    hint="Evaluate rows with labels. Loss(weight=...) is what the job counts.",
                )
        return self._evaluated(totals, rows, parts)

    def _evaluated(self, totals: Mapping[str, Tensor], rows: int, parts: Mapping[str, Evaluated] | None = None) -> Evaluated:
        means = {graph: self._means(graph, values.tolist()) for graph, values in totals.items()}
        own = means.pop(self._package.recipe.main)
        metrics = {name: value for name, value in own.items() if name != "loss"}
        metrics |= {f"{graph}.{name}": value for graph, values in means.items() for name, value in values.items()}
        return Evaluated(own["loss"], metrics, rows, parts or {})

    def _means(self, graph: str, totals: Sequence[float]) -> dict[str, float]:
        """The means of loss and metrics, out of what `Engine.evaluate` gives for a graph."""
        names = ["loss", *self._engine.metric_names(graph)]
        return {name: total / totals[-1] for name, total in zip(names, totals[:-1], strict=True)}

    def _microbatches(self, number: int, part: OpenPart) -> Iterator[tuple[Microbatch, float, int]]:
        """The batches of this rank, with the share of the sum over ranks that counts, and how many rows of all ranks that is.

        Every row of a part is evaluated; the last few, fewer than there are ranks, by all ranks alike.
        """
        data = part.dataset
        each = self._plan.rows_per_call
        lanes, lane = self._plan.data_ranks, self._plan.data_index(self._rank)
        static = any(isinstance(i.shape[0], int) for i in self._package.manifest.data_inputs(part.variant).values())
        limit = data.size if self._batches is None else min(data.size, self._batches * each * lanes)
        start = 0
        while start < limit:
            left = limit - start
            count = min(each, left // lanes)
            if static and count < each:
                return
            if count:
                first = start + lane * count
                rows = sequential(data.size, first, count)
                yield Microbatch(data.batch(rows), first, rows, number), 1.0, count * lanes
                start += count * lanes
            else:
                rows = sequential(data.size, start, left)
                yield Microbatch(data.batch(rows), start, rows, number), 1.0 / lanes, left
                start += left
