"""The gate: whether a challenger is promoted, and why, or why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from trainload.core.records import Record
from trainload.retraining.config.expression import Expression, parse

_FINITE = ("train.loss", "eval.loss")
"""What must be a finite number, whatever the expressions say."""

_MOST_REASONS = 3
"""Comparisons that a reason names; all of them are in the verdict's checks."""

Words = Annotated[str, Field(max_length=8192)]


class Check(Record):
    """One thing that was looked at.

    Attributes:
        text: what, and what it came to. slice: of which slice; "": of all rows.
        left, right: the sides of a comparison; None: no finite number, or no comparison.
        holds: None: unknown, which is as bad as false; or it was not judged.
        judged: whether it counts.
    """

    text: Words
    slice: Words = ""
    left: float | None = None
    right: float | None = None
    holds: bool | None
    judged: bool = True


class Verdict(Record):
    """What the gate says. reason: in a sentence. checks: all that was looked at. warnings: what does not stop a challenger."""

    promote: bool
    reason: Words
    checks: tuple[Check, ...]
    warnings: tuple[Words, ...]


def decide(
    require: str,
    values: Mapping[str, float],
    *,
    slices_require: str | None = None,
    slices: Mapping[str, Mapping[str, float]] | None = None,
    slice_least_rows: int = 1,
    drift: Mapping[str, float] | None = None,
    drift_warn: float | None = None,
    drift_bar: float | None = None,
) -> Verdict:
    """Decides about a challenger.

    Args:
        require: the bar, an expression.
        values: name -> number, of all that it names, and of train.loss and eval.loss.
        slices_require: the bar of each slice; None: they have none.
        slices: slice -> its values; "slice.rows" among them.
        slice_least_rows: one with fewer rows is not judged.
        drift: column -> how far it is from the champion's data.
        drift_warn: from where on a column is warned of; None: none is.
        drift_bar: from where on a column rejects the challenger; None: none does.

    Raises:
        RequestError: an expression is none, or names what has no value.
    """
    checks = [
        Check(text=f"{name} is finite: {values[name]:.6g}", left=_finite(values[name]), holds=math.isfinite(values[name]))
        for name in _FINITE
        if name in values
    ]
    failed = [each.text for each in checks if not each.holds]
    failed += _required(parse(require, "gate.require"), values, "", checks)
    if slices_require is not None:
        bar = parse(slices_require, "evaluation.slices.require")
        for name, own in sorted((slices or {}).items()):
            if own["slice.rows"] < slice_least_rows:
                few = f"not judged: {own['slice.rows']:.0f} rows, fewer than {slice_least_rows}"
                checks.append(Check(text=few, slice=name, holds=None, judged=False))
            else:
                failed += _required(bar, own, name, checks)
    warnings = []
    for column, distance in sorted((drift or {}).items()):
        barred = drift_bar is not None and distance >= drift_bar
        text = f"column {column} has drifted: {distance:.3g}"
        if barred:
            checks.append(Check(text=f"{text}, which reaches the bar of {drift_bar:g}", left=distance, right=drift_bar, holds=False))
            failed.append(checks[-1].text)
        elif drift_warn is not None and distance >= drift_warn:
            warnings.append(f"{text}, which reaches the warning level of {drift_warn:g}")
    held = [f"{each.slice}: {each.text}" if each.slice else each.text for each in checks if each.right is not None and each.holds]
    reason = _listed(failed or held) or "all requirements are met"
    return Verdict(promote=not failed, reason=reason[:8192], checks=tuple(checks), warnings=tuple(warnings))


def _required(expression: Expression, values: Mapping[str, float], slice_name: str, checks: list[Check]) -> list[str]:
    """Adds an expression's comparisons to `checks`. Returns: why it does not hold; [] where it does."""
    expression.check(values.keys())
    holds, comparisons = expression.evaluate(values)
    checks += [
        Check(text=str(each), slice=slice_name, left=_finite(each.left), right=_finite(each.right), holds=each.holds)
        for each in comparisons
    ]
    if holds:
        return []
    wrong = [str(each) for each in comparisons if not each.holds] or [f"{expression.text}: false"]
    return [f"{slice_name}: {text}" if slice_name else text for text in wrong]


def _listed(texts: Sequence[str]) -> str:
    """Return the first texts, and how many more there are."""
    more = len(texts) - _MOST_REASONS
    return "; ".join(texts[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
