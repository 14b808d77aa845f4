"""The first bad value of a step, over all ranks, for a user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainload.launching.debugging.sighting import Sighting
from trainload.launching.debugging.tensor_facts import Level, TensorFacts

_MOST_NAMES = 5
_MADE = {
    "inf": "makes an infinity",
    "nan": "makes a NaN",
    "above": "makes a value above the limit",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The first bad value of a step.

    Attributes:
        sighting: where it appears and what it was computed from.
        rank: the rank that computed it.
        parameters: parameters whose gradients or new values are bad because of it, on any rank.
    """

    sighting: Sighting
    rank: int
    parameters: tuple[str, ...]

    @property
    def what(self) -> str:
        """Effect of the operator: "aten.log.default makes an infinity"."""
        found = self.sighting
        if found.part == "input":
            return f"{found.operator} has {_bad_counts(found.result)}"
        kind = "nan" if found.level is Level.NAN else "inf" if found.result.infinities else "above"
        return f"{found.operator} {_MADE[kind]}"

    @property
    def where(self) -> str:
        """Part, module, line and rows: "forward, module 'head', model.py:12: y = x.log()"."""
        found = self.sighting
        places = [] if found.part == "input" else [f"in the {found.part}"]
        if found.part in ("forward", "backward"):
            places[0] += f" of {found.module}" if found.module else " of the model or the loss"
        if found.line:
            places.append(f"at {found.line}")
        if found.rows:
            kind = "row" if len(found.rows) == 1 else "rows"
            places.append(f"{kind} {_listed(found.rows)} of {found.source}")
        if self.rank:
            places.append(f"rank {self.rank}")
        return ", ".join(places)

    def __str__(self) -> str:
        """Return it as sentences."""
        inputs = "; ".join(map(str, self.sighting.inputs))
        computed = f" Its inputs: {inputs}." if inputs else ""
        where = f" {self.where}" if self.where else ""
        return f"{self.what}{where}.{computed}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON and the journal."""
        return {
            **self.sighting.as_json(),
            "what": self.what,
            "where": self.where,
            "rank": self.rank,
            "parameters": list(self.parameters),
        }


def first_of(sightings: Iterable[tuple[int, Sequence[Sighting]]]) -> Finding | None:
    """Return the first bad value that a rank made itself; None if no rank has seen any.

    Args:
        sightings: (rank, its sightings).
    """
    every = [(rank, sighting) for rank, seen in sightings for sighting in seen]
    if not every:
        return None
    rank, first = min(
        every, key=lambda pair: (pair[1].from_peers, pair[1].call, pair[1].position, pair[0])
    )
    reached = dict.fromkeys(name for _, sighting in every for name in sighting.parameters)
    return Finding(first, rank, tuple(reached))


def _bad_counts(facts: TensorFacts) -> str:
    counts = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in (
            (facts.nans, "NaN", "NaNs"),
            (facts.infinities, "infinity", "infinities"),
        )
        if count
    ]
    return " and ".join(counts) or "values above the limit"


def _listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(str, names[:_MOST_NAMES])) + more
