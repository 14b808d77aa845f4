"""Finds the variant of a graph that accepts a batch, by the variants' guards.

A captured graph does not check sizes itself: if a model branches on `x.shape[1] > 20`, its graph
runs the captured branch on all sizes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.capture.guard import FixedValue, Guard, fixed_value, limits_text
from trainload.capture.guards.size_expressions import Expression, parse
from trainload.capture.job.inputs import constants_of, leaves_of
from trainload.core.errors import DataError

Facts = Mapping[str, "tuple[torch.dtype, Sequence[int]]"]
"""Input name -> its dtype and sizes."""

Constants = Mapping[str, FixedValue]
"""Constants by name; those that are None are left out."""

_CONSTANT_TYPES = (str, int, float, enum.Enum)
_MAX_OUTCOMES = 4096
"""Number of cached outcomes of a variant's conditions: a run sees few different lengths."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A reason why a variant does not accept a batch.

    Attributes:
        where: "mask", "tokens[1]".
        expected: requirement of the guard.
        got: what the batch has.
        coarse: True if it concerns the presence, dtype, number of dims or value of an entry, not a
            size.
    """

    where: str
    expected: str
    got: str
    coarse: bool

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got}"


class Dispatcher:
    """Selects the variant of a graph, or of several graphs that run on the same batch, for a batch.

    Args:
        graph: name of the graph in errors.
        guards: variant ("" is the first) -> the guards of its graphs, all of which must hold; in
            the order in which they are tried.
        ignored: inputs and constants that a batch may have although no guard names them: those of
            other graphs of the package.
        fed: inputs that no batch has, since another graph computes them.

    Attributes:
        names: names of all entries that a batch may have.
    """

    def __init__(
        self,
        graph: str,
        guards: Mapping[str, Sequence[Guard]],
        *,
        ignored: Collection[str] = (),
        fed: Collection[str] = (),
    ) -> None:
        assert guards, "a graph has one variant at least"
        every = [guard for variant_guards in guards.values() for guard in variant_guards]
        constant_names = {name for guard in every for name in guard.constants}
        # A constant that all variants agree on picks none of them, so a batch need not have it.
        deciding = {
            name
            for name in constant_names
            if len({guard.constants.get(name) for guard in every}) > 1
        }
        first = {
            name: value
            for guard in next(iter(guards.values()))
            for name, value in guard.constants.items()
            if value.kind != "none"
        }
        usual = {name: first.get(name) for name in deciding}
        self._graph = graph
        self._variants = {
            name: tuple(_Matcher(guard, usual, frozenset(fed)) for guard in variant_guards)
            for name, variant_guards in guards.items()
        }
        inputs = {
            name for guard in every for name in (*(i.name for i in guard.inputs), *guard.absent)
        }
        self.names = frozenset((inputs | constant_names | set(ignored)) - set(fed))

    def pick(self, batch: Mapping[str, Any]) -> str:
        """Return the first variant that accepts a batch.

        Constants that the batch leaves out have the first variant's values.

        Args:
            batch: name -> tensor or constant, flat with dotted names or nested like the job's
                batch.

        Raises:
            DataError: if no variant accepts it. The message gives a reason for each, the nearest
                first.
        """
        facts: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
        constants: dict[str, FixedValue] = {}
        for name, value in batch.items():
            if name not in self.names:
                return self._pick_nested(batch)
            if isinstance(value, Tensor):
                facts[name] = (value.dtype, value.shape)
            elif isinstance(value, _CONSTANT_TYPES):
                constants[name] = fixed_value(value)
            elif value is not None:
                return self._pick_nested(batch)
        return self.pick_facts(facts, constants)

    def pick_facts(self, facts: Facts, constants: Constants) -> str:
        """Return the variant for a batch, given the dtypes and sizes of its inputs, and its
        constants.
        """
        for name, matchers in self._variants.items():
            for matcher in matchers:
                if not matcher.takes(facts, constants):
                    break
            else:
                return name
        raise self._error(facts, constants)

    def misfits(self, facts: Facts, constants: Constants) -> dict[str, Misfit]:
        """Return the first reason of each variant that rejects a batch, nearest variant first."""
        misfits_by_variant = {
            name: [m for matcher in matchers for m in matcher.misfits(facts, constants)]
            for name, matchers in self._variants.items()
        }
        ranked = sorted(
            (sum(m.coarse for m in misfits), len(misfits), order, name)
            for order, (name, misfits) in enumerate(misfits_by_variant.items())
            if misfits
        )
        return {name: misfits_by_variant[name][0] for *_, name in ranked}

    def _pick_nested(self, batch: Mapping[str, Any]) -> str:
        leaves = leaves_of(batch, values=False)
        constants = {
            name: fixed_value(value)
            for name, value in constants_of(batch).items()
            if value is not None
        }
        unknown = sorted(set(leaves).union(constants) - self.names)
        if unknown:
            raise DataError(
                f"the batch has entries that no variant accepts: {', '.join(map(repr, unknown))}",
                where=f"graph {self._graph}",
                expected=", ".join(sorted(self.names)),
                got=", ".join(sorted({*leaves, *constants})),
                hint="Omit them.",
            )
        return self.pick_facts(
            {name: (leaf.dtype, leaf.shape) for name, leaf in leaves.items()}, constants
        )

    def _error(self, facts: Facts, constants: Constants) -> DataError:
        reasons = [
            f"{name or 'the first'}: {misfit}"
            for name, misfit in self.misfits(facts, constants).items()
        ]
        if len(reasons) == 1:
            return DataError(
                f"the graph does not accept this batch: {reasons[0].partition(': ')[2]}",
                where=f"graph {self._graph}",
                hint=(
                    "`trainload inspect` lists what it accepts. To accept more, freeze the job"
                    " again with Job.dynamic or Job.variants."
                ),
            )
        return DataError(
            f"none of the {len(reasons)} variants accepts this batch (nearest first):"
            f" {'; '.join(reasons)}",
            where=f"graph {self._graph}",
            hint=(
                "`trainload inspect` lists what each accepts. To accept more, freeze the job again"
                " with a further entry in Job.variants."
            ),
        )


class _Matcher:
    """A guard, prepared for fast checks.

    Dims are compared or bind a slot; then expressions and conditions are evaluated.

    `usual`: constants on which variants differ -> the value if a batch leaves them out; None if it
    must not.
    """

    def __init__(
        self, guard: Guard, usual: Mapping[str, FixedValue | None], fed: frozenset[str]
    ) -> None:
        self._guard = guard
        inputs = [i for i in guard.inputs if i.name not in fed]
        absent = [name for name in guard.absent if name not in fed]
        self._nothing = (
            *absent,
            *(name for name, value in guard.constants.items() if value.kind == "none"),
        )
        self._constants = tuple(
            (n, v, usual.get(n) if n in usual else v)
            for n, v in guard.constants.items()
            if v.kind != "none"
        )
        self._slots: dict[str, int] = {}
        self._derived: list[tuple[str, int, Expression]] = []
        plain = {s for i in inputs for s in i.sizes if isinstance(s, str) and s in guard.ranges}
        self._whole: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._parts: list[
            tuple[str, torch.dtype, int, tuple[tuple[int, int | None, int, int, float], ...]]
        ] = []
        for entry in inputs:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            fixed = tuple(s for s in entry.sizes if isinstance(s, int))
            if len(fixed) == len(entry.sizes):
                self._whole.append((entry.name, dtype, fixed))
                continue
            dims: list[tuple[int, int | None, int, int, float]] = []
            for dim, size in enumerate(entry.sizes):
                if isinstance(size, int):
                    dims.append((dim, size, 0, 0, 0))
                elif size in plain:
                    least, most = guard.ranges[size]
                    dims.append(
                        (dim, None, self._slot(size), least, float("inf") if most is None else most)
                    )
                else:
                    self._derived.append((entry.name, dim, parse(size)))
            self._parts.append((entry.name, dtype, len(entry.sizes), tuple(dims)))
        self._solved: list[tuple[str, int, str, int, int]] = []
        for name, dim, expression in self._derived:
            line = expression.affine()
            if (
                line is not None
                and expression.symbols[0] not in plain
                and expression.symbols[0] not in {s[2] for s in self._solved}
            ):
                self._solved.append((name, dim, expression.symbols[0], *line))
        self._conditions = [parse(text) for text in guard.conditions]
        # conditions on sizes that only fed inputs have were checked for the graph that feeds them
        if fed:
            known_symbols = {*self._slots, *(symbol for _, _, symbol, _, _ in self._solved)}
            self._derived = [
                derived for derived in self._derived if set(derived[2].symbols) <= known_symbols
            ]
            self._conditions = [
                condition
                for condition in self._conditions
                if set(condition.symbols) <= known_symbols
            ]
        self._outcomes: dict[tuple[int, ...], bool] = {}

    def _slot(self, symbol: str) -> int:
        return self._slots.setdefault(symbol, len(self._slots))

    def takes(self, facts: Facts, constants: Constants) -> bool:
        """Return True if the guard holds.

        A run checks every batch, so this stops at the first entry that does not fit.
        """
        for name in self._nothing:
            if name in facts or name in constants:
                return False
        for name, value, usual in self._constants:
            constant = constants.get(name, usual)
            if (
                name in facts
                or constant is None
                or (constant != value and not _is_named_member(constant, value))
            ):
                return False
        for name, dtype, shape in self._whole:
            fact = facts.get(name)
            if fact is None or fact[0] is not dtype or tuple(fact[1]) != shape:
                return False
        bound: list[int] = [-1] * len(self._slots)
        for name, dtype, ndim, dims in self._parts:
            fact = facts.get(name)
            if fact is None or fact[0] is not dtype:
                return False
            sizes = fact[1]
            if len(sizes) != ndim:
                return False
            for dim, fixed_size, slot, least, most in dims:
                size = sizes[dim]
                if fixed_size is not None:
                    if size != fixed_size:
                        return False
                elif bound[slot] != size:
                    if bound[slot] >= 0 or not least <= size <= most:
                        return False
                    bound[slot] = size
        if not self._derived and not self._conditions:
            return True
        key = (*bound, *(facts[name][1][dim] for name, dim, _ in self._derived))
        outcome = self._outcomes.get(key)
        if outcome is None:
            if len(self._outcomes) >= _MAX_OUTCOMES:
                self._outcomes.clear()
            outcome = self._outcomes[key] = not any(
                True for _ in self._size_misfits(facts, dict(zip(self._slots, bound, strict=True)))
            )
        return outcome

    def misfits(self, facts: Facts, constants: Constants) -> Iterator[Misfit]:
        """Yield all reasons: entries of the batch, then sizes, then conditions on several sizes."""
        before = True
        for misfit in self._entry_misfits(facts, constants):
            before = False
            yield misfit
        if before:
            values: dict[str, int] = {}
            for entry in self._guard.inputs:
                for size, actual_size in zip(
                    entry.sizes, facts[entry.name][1] if entry.name in facts else (), strict=False
                ):
                    if isinstance(size, str) and size in self._slots:
                        values[size] = actual_size
            yield from self._size_misfits(facts, values)

    def _entry_misfits(self, facts: Facts, constants: Constants) -> Iterator[Misfit]:
        for name in self._nothing:
            if name in facts or name in constants:
                yield Misfit(name, "nothing", _describe_entry(name, facts, constants), coarse=True)
        for name, value, usual in self._constants:
            constant = constants.get(name, usual)
            if (
                name in facts
                or constant is None
                or (constant != value and not _is_named_member(constant, value))
            ):
                usually = (
                    f"nothing, which means {usual}"
                    if name not in constants and name not in facts and usual is not None
                    else ""
                )
                yield Misfit(
                    name,
                    str(value),
                    usually or _describe_entry(name, facts, constants),
                    coarse=True,
                )
        dims_of = {name: dims for name, _, _, dims in self._parts}
        shown = {
            entry.name: f"{entry.dtype}[{', '.join(map(str, entry.sizes))}]"
            for entry in self._guard.inputs
        }
        first: dict[int, tuple[int, str]] = {}
        checked = [(name, dtype, len(shape)) for name, dtype, shape in self._whole] + [
            (n, d, count) for n, d, count, _ in self._parts
        ]
        fixed = {name: shape for name, _, shape in self._whole}
        for name, dtype, ndim in checked:
            fact = facts.get(name)
            if fact is None or fact[0] is not dtype or len(fact[1]) != ndim:
                yield Misfit(
                    name, shown[name], _describe_entry(name, facts, constants), coarse=True
                )
                continue
            for dim, expected_size in enumerate(fixed.get(name, ())):
                if fact[1][dim] != expected_size:
                    yield Misfit(
                        f"{name}[{dim}]", str(expected_size), str(fact[1][dim]), coarse=False
                    )
            for dim, fixed_size, slot, least, most in dims_of.get(name, ()):
                size = fact[1][dim]
                if fixed_size is not None:
                    if size != fixed_size:
                        yield Misfit(f"{name}[{dim}]", str(fixed_size), str(size), coarse=False)
                    continue
                other, where = first.setdefault(slot, (size, f"{name}[{dim}]"))
                if size != other:
                    yield Misfit(f"{name}[{dim}]", f"{other}, as {where}", str(size), coarse=False)
                elif where == f"{name}[{dim}]" and not least <= size <= most:
                    yield Misfit(
                        where,
                        limits_text(least, None if most == float("inf") else int(most)),
                        str(size),
                        coarse=False,
                    )

    def _size_misfits(self, facts: Facts, values: dict[str, int]) -> Iterator[Misfit]:
        """Yield the reasons from derived sizes and conditions.

        values: values of the symbols that appear alone among the sizes.
        """
        for name, dim, symbol, factor, offset in self._solved:
            value, rest = divmod(facts[name][1][dim] - offset, factor)
            least, most = self._guard.ranges[symbol]
            text = next(e.text for n, d, e in self._derived if (n, d) == (name, dim))
            if rest or value < least or (most is not None and value > most):
                limits = limits_text(least, most)
                yield Misfit(
                    f"{name}[{dim}]",
                    f"{text} where {symbol} is {limits}",
                    str(facts[name][1][dim]),
                    coarse=False,
                )
                return
            values[symbol] = value
        for name, dim, expression in self._derived:
            expected_size = _evaluate(expression.value, values)
            size = facts[name][1][dim]
            if size != expected_size:
                yield Misfit(
                    f"{name}[{dim}]",
                    f"{expression.text} = {expected_size}",
                    str(size),
                    coarse=False,
                )
        for condition in self._conditions:
            if not _evaluate(condition.value, values):
                got = ", ".join(f"{symbol} = {values[symbol]}" for symbol in condition.symbols)
                yield Misfit("sizes", condition.text, got, coarse=False)


def _evaluate(
    function: Callable[[Mapping[str, int]], int], values: Mapping[str, int]
) -> int | None:
    """Return the value; None for a division by zero, which no size satisfies."""
    try:
        return function(values)
    except ZeroDivisionError:
        return None


def _is_named_member(constant: FixedValue, value: FixedValue) -> bool:
    """Return True if a string names the Enum member: a package is used without the Enum's class."""
    return value.kind == "enum" and constant.kind == "str" and constant.text == value.text


def _describe_entry(name: str, facts: Facts, constants: Constants) -> str:
    if name in facts:
        dtype, sizes = facts[name]
        return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, sizes))}]"
    return str(constants[name]) if name in constants else "nothing"
