"""The last sample of a run's statistics by module, as tables of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainload.report.frame.words import percent, sanitize
from trainload.report.runs.history import History

_MOST_ROWS = 2000
_LONG = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """The last sample of a graph, as displayed.

    Attributes:
        step: number of the step, from 1.
        graph: name of the graph; "" if the job has one.
        notes: remarks on what trains badly.
        activations: name, and [rms, greatest, zeros, saturated] of each.
        parameters: name, and [norm, gradient, update, ratio] of each.
        more: number of rows that are left out.
    """

    step: int
    graph: str
    notes: Sequence[str]
    activations: Sequence[tuple[str, Sequence[str]]]
    parameters: Sequence[tuple[str, Sequence[str]]]
    more: int


def samples_of(history: History) -> list[Sample]:
    """Return the last sample of each graph of a run; [] if it takes none."""
    return [_sample(event.data) for event in history.of("statistics")]


def _sample(data: Mapping[str, Any]) -> Sample:
    activations, parameters = data["activations"], data["parameters"]
    return Sample(
        int(data["step"]),
        sanitize(str(data.get("graph", "")), _LONG),
        [sanitize(str(note), _LONG) for note in data["notes"]],
        [
            (
                _named(each),
                [
                    *(_digits(each[name]) for name in ("rms", "greatest")),
                    *(_share(each[name]) for name in ("zeros", "saturated")),
                ],
            )
            for each in activations[:_MOST_ROWS]
        ],
        [
            (
                sanitize(str(each["parameter"]), _LONG),
                [_digits(each[name]) for name in ("norm", "gradient", "update", "ratio")],
            )
            for each in parameters[:_MOST_ROWS]
        ],
        max(0, len(activations) - _MOST_ROWS) + max(0, len(parameters) - _MOST_ROWS),
    )


def _named(activation: Mapping[str, Any]) -> str:
    parts = (activation["module"] or "the model", activation["operator"])
    return sanitize(" ".join(str(part) for part in parts if part), _LONG)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)
