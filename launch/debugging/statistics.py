"""Statistics of a step by module: activations, gradients, and updates over parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from trainload.launching.debugging.activation_sums import Site, Sums
from trainload.sharding.plans.plan import Plan

_MANY = 0.9
"""Fraction of dead units, or of saturated values, from which a note says so."""
_LARGE_UPDATE = 0.1
"""Norm of a matrix's update over its own norm from which a note says so."""


@dataclass(frozen=True, slots=True)
class ActivationStatistics:
    """The result of a module, or of an activation function in it, over the batches of a step.

    Attributes:
        module: path of the user's module; "" for the model itself and the loss.
        operator: the activation function; "" for the result of the module.
        number: number of the call of the function in the module, from 0.
        line: line of the user's code.
        rms: root mean square.
        greatest: greatest magnitude.
        zeros: fraction of values that are zero.
        dead: fraction of the units, the elements of the last dim, that are zero in every row and
            position; None if they were not followed.
        saturated: fraction of values within 1 % of an end of the function's range; None if it has
            no such range.
    """

    module: str
    operator: str
    number: int
    line: str
    rms: float
    greatest: float
    zeros: float
    dead: float | None
    saturated: float | None

    @property
    def note(self) -> str:
        """A remark on values that train badly; "" for none."""
        if self.operator and self.dead is not None and self.dead >= _MANY:
            return f"{100 * self.dead:.0f} % of its units are dead"
        if self.saturated is not None and self.saturated >= _MANY:
            return f"{100 * self.saturated:.0f} % saturated"
        return ""


@dataclass(frozen=True, slots=True)
class ParameterStatistics:
    """A parameter before a step, and what the step did to it.

    Attributes:
        parameter: name of the parameter.
        norm: its L2 norm before the step.
        gradient: norm of its gradient, before clipping; None if it is not finite.
        update: norm of the change that the step made; None if it is not finite.
        is_matrix: True if it has two dims or more.
    """

    parameter: str
    norm: float
    gradient: float | None
    update: float | None
    is_matrix: bool

    @property
    def ratio(self) -> float | None:
        """Norm of the update over that of the parameter; None if that is 0 or unknown."""
        return self.update / self.norm if self.norm and self.update is not None else None

    @property
    def note(self) -> str:
        """A remark on an update that is too large; "" for none."""
        if not self.is_matrix or self.ratio is None or self.ratio < _LARGE_UPDATE:
            return ""
        return f"the update is {100 * self.ratio:.0f} % of the parameter"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a step.

    Attributes:
        activations: by module, in the order in which they are computed.
        parameters: in the order of the plan's buckets.
    """

    activations: tuple[ActivationStatistics, ...]
    parameters: tuple[ParameterStatistics, ...]

    def notes(self) -> list[str]:
        """Return the remarks, with what they are about."""
        named = [
            (" ".join(filter(None, (each.module or "the model", each.operator))), each.note)
            for each in self.activations
        ] + [(each.parameter, each.note) for each in self.parameters]
        return [f"{name}: {note}" for name, note in named if note]

    def as_record(self) -> dict[str, Any]:
        """Return what a run's journal has: numbers with four digits, without lines."""
        return {
            "notes": self.notes(),
            "activations": [_brief(each, leave_out=("line", "dead")) for each in self.activations],
            "parameters": [
                {**_brief(each, leave_out=("is_matrix",)), "ratio": _digits(each.ratio)}
                for each in self.parameters
            ],
        }

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "activations": [{**asdict(each), "note": each.note} for each in self.activations],
            "parameters": [
                {**asdict(each), "ratio": each.ratio, "note": each.note} for each in self.parameters
            ],
        }


def _brief(each: ActivationStatistics | ParameterStatistics, leave_out: Sequence[str]) -> Any:
    fields = asdict(each).items()
    return {name: _digits(value) for name, value in fields if name not in leave_out}


def _digits(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def joined(turns: Iterable[tuple[str, Statistics]]) -> Statistics:
    """Return the statistics of all graphs of a step, of each graph's last update.

    Args:
        turns: (training graph, statistics) of each update of the step.
    """
    last = dict(turns).values()
    return Statistics(
        tuple(each for statistics in last for each in statistics.activations),
        tuple(each for statistics in last for each in statistics.parameters),
    )


def activation_statistics(sums: Mapping[Site, Sums]) -> tuple[ActivationStatistics, ...]:
    """Return the statistics of activations from their sums; sites without values are left out."""
    return tuple(
        ActivationStatistics(
            site.module,
            site.operator,
            site.number,
            each.line,
            math.sqrt(each.squares.item() / each.count),
            each.greatest.item(),
            each.zeros.item() / each.count,
            None if each.alive is None else 1 - each.alive.double().mean().item(),
            None if each.saturated is None else each.saturated.item() / each.count,
        )
        for site, each in sums.items()
        if each.count
    )


def parameter_statistics(
    plan: Plan, parameters: Sequence[str], sums: Tensor
) -> tuple[ParameterStatistics, ...]:
    """Return the statistics of the parameters that a graph trains.

    Args:
        plan: plan of the run.
        parameters: names of the parameters.
        sums: float64 (parameters, 3), as those of `UpdateSums`, over all ranks.
    """
    shapes = {slot.parameter: slot.shape for bucket in plan.buckets for slot in bucket.slots}
    return tuple(
        ParameterStatistics(name, norm, _finite(gradient), _finite(update), len(shapes[name]) > 1)
        for name, (norm, gradient, update) in zip(parameters, sums.sqrt().tolist(), strict=True)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
