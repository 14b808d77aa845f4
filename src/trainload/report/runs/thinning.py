"""Downsample long columns of numbers for charts without losing spikes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainload.report.runs.history import Numbers

BUCKETS = 500
"""Maximum number of points of a line, and of the band around it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a line in a chart. NaN in `mean` is a gap.

    Law: if `thinned`, the minimum and maximum of all finite numbers are in `low` and `high`.

    Attributes:
        x: positions.
        mean: means of the numbers of each point.
        low: minima of these numbers.
        high: maxima of these numbers.
        thinned: True if points stand for several numbers.
        broken: positions of infinite numbers, at most as many as there are buckets.
    """

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    thinned: bool
    broken: Numbers


def thin(x: Numbers, y: Numbers, buckets: int = BUCKETS) -> Line | None:
    """Reduce numbers, ordered by x, to `buckets` points of equally many numbers each.

    Up to 2 * buckets numbers are not reduced. In y, NaN is a missing number, and infinity a
    non-finite one.

    Returns:
        The line; None if there are no numbers.
    """
    present = ~np.isnan(y)
    x, y = x[present], y[present]
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
