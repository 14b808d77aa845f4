"""A package's operators against those of the running torch: each schema that was recorded beside the one that is there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainload.packaging.format.manifest import Manifest
from trainload.packaging.graphs.graph_json import has_higher_order, running_schema, schema_still_fits


class Verdict(Enum):
    """What became of an operator: every call that its recorded schema allowed is allowed still, but for the last two."""

    SAME = "same"
    COMPATIBLE = "compatible"
    INCOMPATIBLE = "incompatible"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One operator of a package.

    Attributes:
        name: "torch.ops.aten.add.Tensor", "torch.ops.higher_order.cond".
        was: the schema where the package was made; "" for one that takes graphs, which has none.
        now: the schema here; None where it is missing, or is of a library that was not imported.
        verdict: what follows from the two.
    """

    name: str
    was: str
    now: str | None
    verdict: Verdict

    @property
    def fits(self) -> bool:
        """Whether the package's graphs can call it."""
        return self.verdict in (Verdict.SAME, Verdict.COMPATIBLE)

    @property
    def told(self) -> str:
        """What an error says of it."""
        return f"was {self.was}, is {self.now or 'missing'}"


def compare_operators(manifest: Manifest) -> tuple[Comparison, ...]:
    """Every operator of a package's graphs, sorted by name. Libraries of operators must have been imported."""
    found = [_compare(name, was) for name, was in manifest.ops.items()]
    for name in manifest.higher_order_ops:
        there = has_higher_order(name)
        found.append(Comparison(f"torch.ops.higher_order.{name}", "", "" if there else None, Verdict.SAME if there else Verdict.MISSING))
    return tuple(sorted(found, key=lambda each: each.name))


def _compare(name: str, was: str) -> Comparison:
    now = running_schema(name) if _is_operator(name) else None
    if now is None:
        return Comparison(name, was, None, Verdict.MISSING)
    if now == was:
        return Comparison(name, was, now, Verdict.SAME)
    return Comparison(name, was, now, Verdict.COMPATIBLE if schema_still_fits(name, was) else Verdict.INCOMPATIBLE)


def _is_operator(name: str) -> bool:
    """Whether a name from a manifest is spelled as one of the dispatcher's."""
    parts = name.split(".")
    return len(parts) == 5 and parts[:2] == ["torch", "ops"] and all(part.isidentifier() for part in parts)
