"""Guards of graphs in the manifest, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from trainload.capture.guard import FixedValue, Guard, InputGuard
from trainload.capture.guards.size_expressions import MAX_LENGTH, Expression, GrammarError, parse
from trainload.core.errors import PackageError
from trainload.core.records import Record

Size = Annotated[int, Field(ge=0, lt=2**63)]
InputName = Annotated[str, Field(min_length=1, max_length=256)]
GuardText = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]
"""A symbol, expression or condition in the grammar of capture/guards/size_expressions.py."""


class FixedEntry(Record):
    """A constant in a variant's batch, as `FixedValue`."""

    kind: Literal["none", "bool", "int", "float", "str", "enum"]
    text: Annotated[str, Field(max_length=65_536)]


class GuardEntry(Record):
    """The conditions on batches that a graph accepts, as `Guard`; `sizes` lists the sizes of its
    inputs, in their order.
    """

    sizes: tuple[tuple[Size | GuardText, ...], ...]
    ranges: dict[GuardText, tuple[Size, Size | None]]
    conditions: Annotated[tuple[GuardText, ...], Field(max_length=10_000)]
    constants: dict[InputName, FixedEntry]
    absent: tuple[InputName, ...]


def guard_entry(guard: Guard) -> GuardEntry:
    """Return the manifest entry of a guard."""
    return GuardEntry(
        sizes=tuple(entry.sizes for entry in guard.inputs),
        ranges={symbol: (least, most) for symbol, (least, most) in guard.ranges.items()},
        conditions=guard.conditions,
        constants={
            name: FixedEntry(kind=value.kind, text=value.text)
            for name, value in guard.constants.items()
        },
        absent=guard.absent,
    )


def guard_of(entry: GuardEntry, inputs: Sequence[tuple[str, str]]) -> Guard:
    """Return a guard: the inverse of `guard_entry`.

    `inputs` has the name and dtype of each input of the graph.
    """
    return Guard(
        inputs=tuple(
            InputGuard(name, dtype, sizes)
            for (name, dtype), sizes in zip(inputs, entry.sizes, strict=True)
        ),
        ranges=entry.ranges,
        conditions=entry.conditions,
        constants={
            name: FixedValue(value.kind, value.text) for name, value in entry.constants.items()
        },
        absent=entry.absent,
    )


def check_guard(
    guard: GuardEntry, inputs: Sequence[tuple[str, Sequence[int | str]]], where: str
) -> None:
    """Check that a guard fits its graph's inputs, follows the grammar of guards, and that sizes
    determine its symbols.

    Args:
        guard: the manifest's entry.
        inputs: name and shape of each input of the graph.
        where: place of the graph, for errors.

    Raises:
        PackageError: one of these does not hold.
    """
    if [len(sizes) for sizes in guard.sizes] != [len(shape) for _, shape in inputs]:
        raise PackageError("the guard does not match the graph's inputs", where=where)
    determined: set[str] = set()
    used_symbols: set[str] = set()
    for (name, shape), sizes in zip(inputs, guard.sizes, strict=True):
        for declared, size in zip(shape, sizes, strict=True):
            if isinstance(declared, int) and size != declared:
                raise PackageError(
                    "a size of the guard differs from that of the input",
                    where=f"{where}, {name}",
                    got=str(size),
                )
            if isinstance(size, str):
                expression = _parse_expression(size, where)
                used_symbols.update(expression.symbols)
                determined.update(expression.symbols if expression.affine() is not None else ())
    for condition in guard.conditions:
        used_symbols.update(_parse_expression(condition, where).symbols)
    if determined != set(guard.ranges) or not used_symbols <= determined:
        wrong = sorted((determined ^ set(guard.ranges)) | (used_symbols - determined))
        raise PackageError(
            "the guard's symbols do not match those that its sizes determine",
            where=where,
            got=", ".join(wrong[:5]),
        )
    for symbol, (least, most) in guard.ranges.items():
        if most is not None and most < least:
            raise PackageError(
                "the guard has an empty range", where=where, got=f"{symbol}: {least} to {most}"
            )
    twice = set(guard.absent) & {name for name, _ in inputs}
    if twice:
        raise PackageError(
            "the guard requires that an input of the graph is absent", where=where, got=min(twice)
        )


def _parse_expression(text: str, where: str) -> Expression:
    try:
        return parse(text)
    except GrammarError as error:
        raise PackageError(
            f"the guard contains an invalid size expression: {error}",
            where=where,
            got=repr(text[:80]),
        ) from error
