"""Long columns of numbers as few points as a chart can show, without losing a spike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainload.report.history import Numbers

BUCKETS = 500
"""Points of a line, and of the band around it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points for a chart, of which NaN in `mean` is a gap.

    Law: where `thinned`, the least and the greatest finite number of all that was given are in `low` and `high`.

    Attributes:
        x: where.
        mean: of the numbers that a point stands for.
        low, high: the least and the greatest of these.
        thinned: whether points stand for several numbers.
        broken: the x of numbers that are infinite, at most one of a bucket.
    """

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    thinned: bool
    broken: Numbers


def thin(x: Numbers, y: Numbers, buckets: int = BUCKETS) -> Line | None:
    """Makes at most `buckets` points of numbers in the order of x, by equal numbers of them; all, if there are no more than twice as many.

    Returns: None where nothing is there. NaN in y: there is no number; infinite: it is no finite one.
    """
    there = ~np.isnan(y)
    x, y = x[there], y[there]
    if not len(y):
        return None
    finite = np.isfinite(y)
    broken = x[~finite]
    if len(broken) > buckets:
        broken = broken[np.linspace(0, len(broken) - 1, buckets).astype(np.int64)]
    y = np.where(finite, y, np.nan)
    if len(y) <= 2 * buckets:
        return Line(x, y, y, y, False, broken)
    starts = np.linspace(0, len(y), buckets, endpoint=False).astype(np.int64)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore"):  # a bucket without a finite number is a gap
        mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / counts
    middle = np.add.reduceat(x, starts) / np.diff(np.append(starts, len(y)))
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    return Line(middle, mean, low, high, True, broken)
