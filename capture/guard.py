"""What a captured graph takes: the guard by which a batch is given to a variant of a graph, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["none", "bool", "int", "float", "str", "enum"]


@dataclass(frozen=True, slots=True)
class FixedValue:
    """A constant of a batch: its kind, and its value as text. An enum's member is its name; a StrEnum's or IntEnum's is its value."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return repr(self.text) if self.kind == "str" else "None" if self.kind == "none" else self.text


def fixed_value(value: object) -> FixedValue:
    """The constant that a batch holds. `value`: None, a bool, number, string or member of an Enum."""
    if value is None:
        return FixedValue("none", "")
    if isinstance(value, bool):
        return FixedValue("bool", str(value))
    if isinstance(value, int):
        return FixedValue("int", str(int(value)))
    if isinstance(value, float):
        return FixedValue("float", repr(float(value)))
    if isinstance(value, str):
        return FixedValue("str", str.__str__(value.value if isinstance(value, enum.Enum) else value))
    assert isinstance(value, enum.Enum), "a batch holds no other constants"
    return FixedValue("enum", value.name)


@dataclass(frozen=True, slots=True)
class InputGuard:
    """One input: its dtype as torch spells it ("int64"), and its sizes: ints, symbols, or expressions of them ("2*tokens_1")."""

    name: str
    dtype: str
    sizes: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """Which batches a captured graph takes.

    Laws: a batch is taken if it has every input, of its dtype and with sizes to which one value of each symbol leads, within `ranges` and
    such that all `conditions` hold; has the constants wherever it says anything of them; and has none of `absent`, or None there. Every
    symbol stands alone, or as factor*symbol + offset, among the sizes, so that the sizes determine it. The graph's example is taken.

    Attributes:
        inputs: in the graph's order.
        ranges: symbol -> its least and greatest value; None: there is no greatest.
        conditions: further conditions over the symbols ("x_1 % 2 == 0"), in the grammar of capture/guards/size_expressions.py.
        constants: what the variant's batch holds beside tensors, by dotted name. It is fixed in the graph.
        absent: inputs and constants of other variants that this one has not, sorted; what it has as None is among the constants.
    """

    inputs: tuple[InputGuard, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    conditions: tuple[str, ...] = ()
    constants: Mapping[str, FixedValue] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        """In one line: inputs with their sizes, what must be absent, constants, and what is asked of the sizes."""
        parts = [", ".join(f"{entry.name} {entry.dtype}[{', '.join(map(str, entry.sizes))}]" for entry in self.inputs)]
        nothing = sorted({*self.absent, *(name for name, value in self.constants.items() if value.kind == "none")})
        if nothing:
            parts.append(f"without {', '.join(nothing)}")
        parts += [f"{name}={value}" for name, value in self.constants.items() if value.kind != "none"]
        asked = [f"{symbol} {limits_text(*span)}" for symbol, span in self.ranges.items() if span != (1, None) or symbol != "batch"]
        return "; ".join([*parts, *asked, *self.conditions])


def limits_text(least: int, most: int | None) -> str:
    """A range in words: "2 to 8", "2 or more", "8"."""
    if most is None:
        return f"{least} or more"
    return str(least) if least == most else f"{least} to {most}"
