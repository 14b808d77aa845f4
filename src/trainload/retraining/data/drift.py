"""Drift of a column's values from the champion's training data: the population stability index
(PSI).

The index compares the shares p and q of two samples in the same bins: sum of (p - q) * ln(p / q).
It is the symmetrized Kullback-Leibler divergence of the binned samples (Jeffreys 1946). Its name
and rule of thumb are from credit scoring (Siddiqi, Credit Risk Scorecards, 2006): below 0.1 little
has changed, from 0.25 on much. The bins are the deciles of the first sample; for integers with few
values, each value is a bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trainload.core.records import Record
from trainload.launching.data.columns import Array

Floats = npt.NDArray[np.float64]

MOST_VALUES = 64
"""Maximum number of distinct integers that are counted individually."""
_PERCENTILES = 100
_MOST_SAMPLES = 200_000
_LEAST = 1e-4
"""Assumed share of an empty bin, which keeps the index finite."""


class ColumnStatistics(Record):
    """Statistics of a column's values, including all elements of rows with dims.

    Attributes:
        count: number of values that were inspected.
        broken: number of these that are NaN or infinite. The other statistics exclude them.
        mean: mean; None if there are no finite values, or it overflows.
        deviation: standard deviation; None likewise.
        least: minimum; None if there are no finite values.
        greatest: maximum; None likewise.
        percentiles: 101 percentiles, from the minimum to the maximum; () if values are counted.
        counts: for integers with few values: value -> its number among the samples.
    """

    count: int
    broken: int
    mean: float | None = None
    deviation: float | None = None
    least: float | None = None
    greatest: float | None = None
    percentiles: Annotated[tuple[float, ...], Field(max_length=_PERCENTILES + 1)] = ()
    counts: Annotated[dict[str, int], Field(max_length=MOST_VALUES)] = Field(default_factory=dict)


class Sampled:
    """Collector of a column's values, block by block.

    Of many values it keeps every n-th, deterministically.
    """

    def __init__(self, dtype: str) -> None:
        self._whole = "int" in dtype or dtype == "bool"
        self._count = self._broken = 0
        self._sum = self._squares = 0.0
        self._least, self._greatest = math.inf, -math.inf
        self._kept: list[Floats] = []
        self._held = 0
        self._every = 1

    def add(self, block: Array) -> None:
        """Add values of any shape."""
        values = np.asarray(block, dtype=np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        self._broken += values.size - finite.size
        self._count += values.size
        if not finite.size:
            return
        self._sum += float(finite.sum())
        with np.errstate(over="ignore"):  # on overflow the deviation is None
            self._squares += float(np.square(finite).sum())
        self._least, self._greatest = (
            min(self._least, float(finite.min())),
            max(self._greatest, float(finite.max())),
        )
        self._kept.append(finite[:: self._every])
        self._held += self._kept[-1].size
        while self._held > _MOST_SAMPLES:
            self._every *= 2
            self._kept = [np.concatenate(self._kept)[::2]]
            self._held = self._kept[0].size

    def statistics(self) -> ColumnStatistics:
        """Return the statistics of all values so far."""
        good = self._count - self._broken
        if not good:
            return ColumnStatistics(count=self._count, broken=self._broken)
        mean = self._sum / good
        samples = np.concatenate(self._kept)
        values, counts = np.unique(samples, return_counts=True)
        few = self._whole and values.size <= MOST_VALUES
        percentiles = (
            ()
            if few
            else tuple(float(each) for each in np.percentile(samples, np.arange(_PERCENTILES + 1)))
        )
        return ColumnStatistics(
            count=self._count,
            broken=self._broken,
            mean=_number(mean),
            deviation=_number(
                math.sqrt(max(0.0, self._squares / good - mean * mean))
                if math.isfinite(self._squares)
                else math.inf
            ),
            least=self._least,
            greatest=self._greatest,
            percentiles=percentiles,
            counts=(
                {str(int(value)): int(count) for value, count in zip(values, counts, strict=True)}
                if few
                else {}
            ),
        )


def drift_of(
    before: Mapping[str, ColumnStatistics], now: Mapping[str, ColumnStatistics]
) -> dict[str, float]:
    """Return the index of each column that has finite values in both.

    Laws: it is finite and not negative, and 0 if the statistics are the same.

    Args:
        before: statistics of the champion's training data.
        now: statistics of other data.
    """
    distances = {}
    for name in sorted(before.keys() & now.keys()):
        first, second = before[name], now[name]
        if first.mean is not None and second.mean is not None:
            distances[name] = _index(*_shares(first, second))
    return distances


def _shares(first: ColumnStatistics, second: ColumnStatistics) -> tuple[Floats, Floats]:
    """Return the shares of two samples in the bins of the first one."""
    if first.counts and second.counts:
        values = sorted(first.counts.keys() | second.counts.keys())
        samples = [
            np.array([each.counts.get(value, 0) for value in values], dtype=np.float64)
            for each in (first, second)
        ]
        return samples[0] / samples[0].sum(), samples[1] / samples[1].sum()
    edges = np.unique(_percentiles(first)[10:-1:10])
    shares = [
        np.diff(np.concatenate([[0.0], _below(_percentiles(each), edges), [1.0]]))
        for each in (first, second)
    ]
    return shares[0], shares[1]


def _percentiles(statistics: ColumnStatistics) -> Floats:
    if statistics.percentiles:
        return np.array(statistics.percentiles)
    values = sorted(statistics.counts, key=int)
    counts = [statistics.counts[value] for value in values]
    return np.repeat([float(value) for value in values], counts)[
        np.round(np.linspace(0, sum(counts) - 1, _PERCENTILES + 1)).astype(np.int64)
    ]


def _below(percentiles: Floats, edges: Floats) -> Floats:
    """Return the share of a sample that is at most each edge.

    It is interpolated linearly between two percentiles; if several percentiles are equal, all of
    them count.
    """
    levels = np.linspace(0.0, 1.0, percentiles.size)
    values, first = np.unique(percentiles, return_index=True)
    last = np.append(first[1:], percentiles.size) - 1
    shares: Floats = np.interp(edges, values, levels[last], left=0.0, right=1.0)
    between = ~np.isin(edges, values)
    above = np.searchsorted(values, edges)
    for at in np.flatnonzero(between & (above > 0) & (above < values.size)):
        low, high = values[above[at] - 1], values[above[at]]
        start, stop = levels[last[above[at] - 1]], levels[first[above[at]]]
        shares[at] = start + (stop - start) * (edges[at] - low) / (high - low)
    return shares


def _index(before: Floats, now: Floats) -> float:
    p, q = (np.maximum(each, _LEAST) for each in (before, now))
    p, q = p / p.sum(), q / q.sum()
    return float(max(0.0, ((p - q) * np.log(p / q)).sum()))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
