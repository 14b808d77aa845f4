"""Find the first value at which two executions of a step part, beyond what rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainload.launching.debugging.recorded_values import RecordedValues, ValueOrigin
from trainload.launching.debugging.value_sketch import relative_distance_of

_FACTOR = 10.0
"""A value may differ by this many times the distance of a run with rounding errors: a sum of many
terms rounds more than once.
"""
_LEAST, _LEAST_OF_HALVES = 32.0, 8.0
"""Units in the last place of a value's dtype that rounding explains anywhere; sums of halves are
computed in float32.
"""
_EPS_OF_HALVES = 1e-4


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value in two executions of a step.

    Attributes:
        what: "result of layers.3", "gradient of layers.3.weight", or the operator.
        module: path of the user's module; "" for the model itself and the loss.
        line: line of the user's code; "" if it is unknown.
        part: "forward" or "backward".
        dtype: its dtype, without "torch.".
        distance: norm of the difference over the norm, estimated from sketches; infinite if one of
            the values is not finite.
        explained: distance that rounding explains.
    """

    what: str
    module: str
    line: str
    part: str
    dtype: str
    distance: float
    explained: float

    @property
    def departs(self) -> bool:
        """True if rounding does not explain the distance."""
        return self.distance > self.explained


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """Differences of two executions of a step.

    Attributes:
        first: the first value that departs; None if there is none.
        values: results of modules and gradients of parameters, in the order of their computation.
        by_operators: True if every operator was compared; False if the executions have other
            graphs, as those of another version of torch or another device have, so that only
            results of modules and gradients were.
    """

    first: ValueDifference | None
    values: tuple[ValueDifference, ...]
    by_operators: bool

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "first": None if self.first is None else asdict(self.first),
            "values": [{**asdict(each), "departs": each.departs} for each in self.values],
            "by_operators": self.by_operators,
        }


def compare_values(
    own: RecordedValues, other: RecordedValues, rounded: Sequence[RecordedValues]
) -> ValueComparison:
    """Compare the values of a step with those of another execution of it.

    Args:
        own: the values.
        other: values of the other execution.
        rounded: values of runs with rounding errors, in the order of `own`.
    """
    by_operators = _names(own) == _names(other)
    differences = [
        (origin, _difference(origin, at, own, other, place, rounded))
        for at, origin, place in _pairs(own, other, by_operators=by_operators)
    ]
    return ValueComparison(
        next((each for _, each in differences if each.departs), None),
        tuple(each for origin, each in differences if origin.sites),
        by_operators,
    )


def _names(record: RecordedValues) -> list[tuple[int, str, str]]:
    return [(each.call, each.node, each.operator) for each in record.origins]


def _pairs(
    own: RecordedValues, other: RecordedValues, *, by_operators: bool
) -> Iterator[tuple[int, ValueOrigin, int]]:
    """Yield the place of a value, its origin and its place in the other execution."""
    places = {
        (each.call, site): place for place, each in enumerate(other.origins) for site in each.sites
    }
    for at, origin in enumerate(own.origins):
        if by_operators:
            yield at, origin, at
            continue
        known = [places[key] for site in origin.sites if (key := (origin.call, site)) in places]
        if known:
            yield at, origin, known[0]


def _difference(
    origin: ValueOrigin,
    at: int,
    own: RecordedValues,
    other: RecordedValues,
    place: int,
    rounded: Sequence[RecordedValues],
) -> ValueDifference:
    def distance(record: RecordedValues, index: int) -> float:
        sketch, norm = record.sketches[index], record.norms[index]
        return relative_distance_of(own.sketches[at], own.norms[at], sketch, norm)

    eps = torch.finfo(getattr(torch, origin.dtype)).eps
    least = (_LEAST_OF_HALVES if eps > _EPS_OF_HALVES else _LEAST) * eps
    return ValueDifference(
        what=origin.sites[0] if origin.sites else origin.operator,
        module=origin.module,
        line=origin.line,
        part=origin.part,
        dtype=origin.dtype,
        distance=distance(other, place),
        explained=max(least, *(_FACTOR * distance(each, at) for each in rounded)),
    )
