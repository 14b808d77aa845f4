"""Comparison of a package's operators with those of the running torch, by their schemas."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainload.packaging.format.manifest import Manifest
from trainload.packaging.graphs.torch_operators import (
    has_higher_order,
    running_schema,
    schema_still_fits,
)


class Verdict(Enum):
    """Result for one operator.

    SAME and COMPATIBLE: every call that the recorded schema allowed is still allowed.
    """

    SAME = "same"
    COMPATIBLE = "compatible"
    INCOMPATIBLE = "incompatible"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One operator of a package.

    Attributes:
        name: "torch.ops.aten.add.Tensor", "torch.ops.higher_order.cond".
        was: schema where the package was written; "" for a higher-order operator, which has none.
        now: schema here; None if the operator is missing, or its library was not imported.
        verdict: result of the comparison.
    """

    name: str
    was: str
    now: str | None
    verdict: Verdict

    @property
    def fits(self) -> bool:
        """True if the package's graphs can call the operator."""
        return self.verdict in (Verdict.SAME, Verdict.COMPATIBLE)

    @property
    def schemas(self) -> str:
        """Both schemas, for an error message."""
        return f"was {self.was}, is {self.now or 'missing'}"


def compare_operators(manifest: Manifest) -> tuple[Comparison, ...]:
    """Compare every operator of a package's graphs, sorted by name.

    Operator libraries must have been imported.
    """
    comparisons = [_compare_schemas(name, was) for name, was in manifest.ops.items()]
    for name in manifest.higher_order_ops:
        registered = has_higher_order(name)
        comparisons.append(
            Comparison(
                f"torch.ops.higher_order.{name}",
                "",
                "" if registered else None,
                Verdict.SAME if registered else Verdict.MISSING,
            )
        )
    return tuple(sorted(comparisons, key=lambda each: each.name))


def _compare_schemas(name: str, was: str) -> Comparison:
    now = running_schema(name) if _is_operator(name) else None
    if now is None:
        return Comparison(name, was, None, Verdict.MISSING)
    if now == was:
        return Comparison(name, was, now, Verdict.SAME)
    return Comparison(
        name, was, now, Verdict.COMPATIBLE if schema_still_fits(name, was) else Verdict.INCOMPATIBLE
    )


def _is_operator(name: str) -> bool:
    """Return True if a name from a manifest has the form of a dispatcher operator's."""
    parts = name.split(".")
    return (
        len(parts) == 5
        and parts[:2] == ["torch", "ops"]
        and all(part.isidentifier() for part in parts)
    )
