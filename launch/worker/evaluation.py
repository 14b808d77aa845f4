"""Evaluation on held-out data: every row exactly once, regardless of the number of ranks."""

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
    """Result of an evaluation on held-out rows.

    Attributes:
        loss: mean loss of the main graph.
        metrics: metrics of the main graph, and losses and metrics of other graphs as "graph.name".
        rows: number of evaluated rows.
        parts: the result for each named part of the data.
    """

    loss: float
    metrics: dict[str, float]
    rows: int
    parts: Mapping[str, Evaluated] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the fields that the journal stores."""
        parts = (
            {"parts": {name: part.as_json() for name, part in self.parts.items()}}
            if self.parts
            else {}
        )
        return {"loss": self.loss, "metrics": self.metrics, "rows": self.rows, **parts}


class Evaluation:
    """A rank's part of the evaluations of a run. All ranks must call it together.

    Args:
        engine: engine whose parameters are evaluated.
        package: package that is trained.
        plan: plan of the run.
        rank: this rank.
        data: held-out data.
        where: name of the data in errors.
        batches: maximum number of global batches of each part of the data; None for all.
        mean: True to evaluate the running mean of the parameters, once there is one.
    """

    def __init__(
        self,
        engine: Engine,
        package: Package,
        plan: Plan,
        rank: int,
        data: RunData,
        where: str,
        *,
        batches: int | None,
        mean: bool,
    ) -> None:
        self._engine, self._package, self._plan, self._rank = engine, package, plan, rank
        self._data, self._where, self._batches, self._mean = data, where, batches, mean

    def __call__(self) -> Evaluated:
        """Evaluate all of the data, and each named part whose weight is not 0.

        Raises:
            DataError: there are too few rows for one batch, or the weight of all rows is 0.
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
                    for graph, graph_totals in self._engine.evaluate(
                        microbatch, part.variant
                    ).items():
                        weighed = graph_totals.double().cpu() * share
                        for sums in (totals, own):
                            sums[graph] = sums[graph] + weighed if graph in sums else weighed
                rows += count
                if part.name is not None and own and all(values[-1] for values in own.values()):
                    parts[part.name] = self._make_result(own, count)
        if not totals:
            raise DataError("the held-out data has too few rows for one batch", where=self._where)
        for graph, values in totals.items():
            if not values[-1]:
                raise DataError(
                    f"the total weight of the {rows} evaluated held-out rows is 0, so their mean"
                    " loss is undefined",
                    where=f"{self._where}, graph {graph}",
                    expected=(
                        "rows that the loss counts: labels that are not all ignored, or a mask that"
                        " is not all 0"
                    ),
                    got="a weight of 0",
                    hint=(
                        "Evaluate rows with labels. The job's Loss(weight=...) defines what is"
                        " counted."
                    ),
                )
        return self._make_result(totals, rows, parts)

    def _make_result(
        self, totals: Mapping[str, Tensor], rows: int, parts: Mapping[str, Evaluated] | None = None
    ) -> Evaluated:
        means = {graph: self._means(graph, values.tolist()) for graph, values in totals.items()}
        own = means.pop(self._package.recipe.main)
        metrics = {name: value for name, value in own.items() if name != "loss"}
        metrics |= {
            f"{graph}.{name}": value
            for graph, values in means.items()
            for name, value in values.items()
        }
        return Evaluated(own["loss"], metrics, rows, parts or {})

    def _means(self, graph: str, totals: Sequence[float]) -> dict[str, float]:
        """Return the means of loss and metrics, computed from the totals of `Engine.evaluate` for a
        graph.
        """
        names = ["loss", *self._engine.metric_names(graph)]
        means = [total / totals[-1] for total in totals[:-1]]
        # packages of earlier versions may have a metric "loss"
        return dict(zip(names, means, strict=True)) | {"loss": means[0]}

    def _microbatches(self, number: int, part: OpenPart) -> Iterator[tuple[Microbatch, float, int]]:
        """Yield this rank's batches, each with its factor in the sum over ranks and the number of
        rows on all ranks.

        Every row of a part is evaluated. The last rows, fewer than there are ranks, are evaluated
        by every rank, with a factor of 1 / ranks.
        """
        data = part.dataset
        rows_per_call = self._plan.rows_per_call
        lanes, lane = self._plan.data_ranks, self._plan.data_index(self._rank)
        static = any(
            isinstance(i.shape[0], int)
            for i in self._package.manifest.data_inputs(part.variant).values()
        )
        limit = (
            data.size
            if self._batches is None
            else min(data.size, self._batches * rows_per_call * lanes)
        )
        start = 0
        while start < limit:
            remaining = limit - start
            count = min(rows_per_call, remaining // lanes)
            if static and count < rows_per_call:
                return
            if count:
                first = start + lane * count
                rows = sequential(data.size, first, count)
                yield Microbatch(data.batch(rows), first, rows, number), 1.0, count * lanes
                start += count * lanes
            else:
                rows = sequential(data.size, start, remaining)
                yield Microbatch(data.batch(rows), start, rows, number), 1.0 / lanes, remaining
                start += remaining
