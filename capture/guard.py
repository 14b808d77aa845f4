"""Guards of captured graphs: data that decides which variant of a graph accepts a batch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["none", "bool", "int", "float", "str", "enum"]


@dataclass(frozen=True, slots=True)
class FixedValue:
    """A constant of a batch: its kind, and its value as text.

    An Enum member is stored by its name, a StrEnum or IntEnum member by its value.
    """

    kind: Kind
    text: str

    def __str__(self) -> str:
        return (
            repr(self.text) if self.kind == "str" else "None" if self.kind == "none" else self.text
        )


def fixed_value(value: object) -> FixedValue:
    """Return the constant for None, a bool, a number, a string or an Enum member of a batch."""
    if value is None:
        return FixedValue("none", "")
    if isinstance(value, bool):
        return FixedValue("bool", str(value))
    if isinstance(value, int):
        return FixedValue("int", str(int(value)))
    if isinstance(value, float):
        return FixedValue("float", repr(float(value)))
    if isinstance(value, str):
        return FixedValue(
            "str", str.__str__(value.value if isinstance(value, enum.Enum) else value)
        )
    assert isinstance(value, enum.Enum), "a batch holds no other constants"
    return FixedValue("enum", value.name)


@dataclass(frozen=True, slots=True)
class InputGuard:
    """Requirements on one input.

    Attributes:
        name: dotted name of the input.
        dtype: dtype as torch spells it ("int64").
        sizes: ints, symbols, or expressions of symbols ("2*tokens_1").
    """

    name: str
    dtype: str
    sizes: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """The batches that a captured graph accepts.

    Laws: a batch is accepted if it has every input, with its dtype and with sizes that follow from
    one value of each symbol, within `ranges` and such that all `conditions` hold; if all constants
    that it specifies have the values in `constants`; and if the names in `absent` are missing or
    None in it. Every symbol appears alone, or as factor*symbol + offset, among the sizes, so that
    the sizes determine it. The graph's example batch is accepted.

    Attributes:
        inputs: inputs in the graph's order.
        ranges: symbol -> its least and greatest value; None: no upper bound.
        conditions: further conditions on the symbols ("x_1 % 2 == 0"), in the grammar of
            capture/guards/size_expressions.py.
        constants: non-tensor values of the variant's batch, by dotted name; the graph has them
            fixed.
        absent: inputs and constants of other variants that this one lacks, sorted; entries that are
            None in its batch are among the constants.
    """

    inputs: tuple[InputGuard, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    conditions: tuple[str, ...] = ()
    constants: Mapping[str, FixedValue] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line: inputs with sizes, absent names, constants, and size conditions."""
        parts = [
            ", ".join(
                f"{entry.name} {entry.dtype}[{', '.join(map(str, entry.sizes))}]"
                for entry in self.inputs
            )
        ]
        nothing = sorted(
            {
                *self.absent,
                *(name for name, value in self.constants.items() if value.kind == "none"),
            }
        )
        if nothing:
            parts.append(f"without {', '.join(nothing)}")
        parts += [
            f"{name}={value}" for name, value in self.constants.items() if value.kind != "none"
        ]
        limits = [
            f"{symbol} {limits_text(*span)}"
            for symbol, span in self.ranges.items()
            if span != (1, None) or symbol != "batch"
        ]
        return "; ".join([*parts, *limits, *self.conditions])


def limits_text(least: int, most: int | None) -> str:
    """Return a range in words: "2 to 8", "2 or more", "8"."""
    if most is None:
        return f"{least} or more"
    return str(least) if least == most else f"{least} to {most}"
