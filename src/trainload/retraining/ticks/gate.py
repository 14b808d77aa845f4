"""The promotion gate: decide if a challenger is promoted, with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from trainload.core.records import Record
from trainload.retraining.config.expression import Expression, parse

_FINITE = ("train.loss", "eval.loss")
"""Values that must be finite, in addition to the expressions."""

_MOST_REASONS = 3
"""Maximum number of comparisons in a reason. The verdict's checks have all of them."""

Words = Annotated[str, Field(max_length=8192)]


class Check(Record):
    """A check of the gate.

    Attributes:
        text: description with the result.
        slice: slice to which it applies; "" for all rows.
        left: left side of a comparison; None if it is not finite, or the check is no comparison.
        right: right side of a comparison; None likewise.
        holds: its result; None if it is unknown, which rejects like False, or was not judged.
        judged: True if it counts.
    """

    text: Words
    slice: Words = ""
    left: float | None = None
    right: float | None = None
    holds: bool | None
    judged: bool = True


class Verdict(Record):
    """Verdict of the gate.

    Attributes:
        promote: True if the challenger is promoted.
        reason: reason for the verdict.
        checks: all checks.
        warnings: findings that do not reject the challenger.
    """

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
    """Decide about a challenger.

    Args:
        require: expression that must hold.
        values: name -> number, for all names in the expression, train.loss and eval.loss.
        slices_require: expression that must hold for each slice; None for none.
        slices: slice -> its values, including "slice.rows".
        slice_least_rows: slices with fewer rows are not judged.
        drift: column -> drift from the champion's data.
        drift_warn: drift from which a column causes a warning; None for no warnings.
        drift_bar: drift from which a column rejects the challenger; None for no such bar.

    Raises:
        RequestError: an expression is invalid, or uses a name without a value.
    """
    checks = [
        Check(
            text=f"{name} is finite: {values[name]:.6g}",
            left=_finite(values[name]),
            holds=math.isfinite(values[name]),
        )
        for name in _FINITE
        if name in values
    ]
    failed = [each.text for each in checks if not each.holds]
    failed += _failed_requirements(parse(require, "gate.require"), values, "", checks)
    if slices_require is not None:
        bar = parse(slices_require, "evaluation.slices.require")
        for name, numbers in sorted((slices or {}).items()):
            if numbers["slice.rows"] < slice_least_rows:
                few = f"not judged: {numbers['slice.rows']:.0f} rows, fewer than {slice_least_rows}"
                checks.append(Check(text=few, slice=name, holds=None, judged=False))
            else:
                failed += _failed_requirements(bar, numbers, name, checks)
    warnings = []
    for column, distance in sorted((drift or {}).items()):
        barred = drift_bar is not None and distance >= drift_bar
        text = f"column {column} has drifted: {distance:.3g}"
        if barred:
            checks.append(
                Check(
                    text=f"{text}, which reaches the bar of {drift_bar:g}",
                    left=distance,
                    right=drift_bar,
                    holds=False,
                )
            )
            failed.append(checks[-1].text)
        elif drift_warn is not None and distance >= drift_warn:
            warnings.append(f"{text}, which reaches the warning level of {drift_warn:g}")
    met = [
        f"{each.slice}: {each.text}" if each.slice else each.text
        for each in checks
        if each.right is not None and each.holds
    ]
    reason = _join_reasons(failed or met) or "all requirements are met"
    return Verdict(
        promote=not failed, reason=reason[:8192], checks=tuple(checks), warnings=tuple(warnings)
    )


def _failed_requirements(
    expression: Expression, values: Mapping[str, float], slice_name: str, checks: list[Check]
) -> list[str]:
    """Append an expression's comparisons to `checks`; return the reasons why it does not hold, []
    if it does.
    """
    expression.check(values.keys())
    holds, comparisons = expression.evaluate(values)
    checks += [
        Check(
            text=str(each),
            slice=slice_name,
            left=_finite(each.left),
            right=_finite(each.right),
            holds=each.holds,
        )
        for each in comparisons
    ]
    if holds:
        return []
    wrong = [str(each) for each in comparisons if not each.holds] or [f"{expression.text}: false"]
    return [f"{slice_name}: {text}" if slice_name else text for text in wrong]


def _join_reasons(texts: Sequence[str]) -> str:
    """Join the first texts, followed by the number of the others."""
    more = len(texts) - _MOST_REASONS
    return "; ".join(texts[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
