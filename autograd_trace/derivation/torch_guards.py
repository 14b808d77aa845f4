"""Derive the guards of captured graphs, that is, the sizes that each graph accepts, from torch's
guards.

Without guards a captured graph would compute on any size, right or wrong: a model that branches on
`x.shape[1] > 20` would run its one captured branch on all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from trainload.autograd_trace.derivation.aot import size_conditions
from trainload.capture.guard import Guard, InputGuard, fixed_value
from trainload.capture.guards.dispatch import Dispatcher
from trainload.capture.guards.size_expressions import GrammarError, parse
from trainload.capture.job.inputs import constants_of
from trainload.capture.program import GraphCapture, Mode, Program, SizeLike
from trainload.capture.tracing.targets import Target
from trainload.core.errors import JobError

_SIZE = re.compile(r"L\['batch'\]\['([\w.]+)'\]\.size\(\)\[(\d+)\]")
_EXTREME = re.compile(r"torch\.sym_(max|min)\(")
"""torch's spelling of the greater of two sizes from 2.14 on; earlier versions use Python's own."""
_FLAT = re.compile(r"L\['flat_args'\]\[(\d+)\]")
"""Spelling of `L['batch'][NAME]` in strict mode."""
_RANGE = re.compile(r"(?P<symbol>[A-Za-z_][\w.]*) (?P<sign><=|<|>=|>) (?P<limit>\d+)", re.ASCII)
_SAME = re.compile(r"\(?(?P<left>[^<=>()]+)\)? [=<>]= \(?(?P<right>[^<=>()]+)\)?")


def with_guards(
    program: Program, targets: Iterable[Target], examples: Mapping[str, Mapping[str, Tensor]]
) -> Program:
    """Return the program with a guard for each graph.

    Args:
        program: the program that was captured from `targets`.
        targets: targets of the job, in order.
        examples: graph -> example of its inputs.

    Raises:
        JobError: a variant would never be picked, since an earlier one accepts its example.
    """
    targets = tuple(targets)
    graphs = dict(program.graphs)
    present: dict[tuple[str, Mode], set[str]] = {}
    for target in targets:
        present_constants = {
            name for name, value in constants_of(target.batch).items() if value is not None
        }
        present.setdefault((target.graph, target.mode), set()).update(
            examples[target.name], present_constants
        )
    for target in targets:
        captured, example = graphs[target.name], examples[target.name]
        constants = {name: fixed_value(value) for name, value in constants_of(target.batch).items()}
        absent = present[target.graph, target.mode] - set(example) - set(constants)
        size = size_guard(captured.exported, captured, example)
        graphs[target.name] = replace(
            captured, guard=replace(size, constants=constants, absent=tuple(sorted(absent)))
        )
    _check_order(graphs, targets)
    return replace(program, graphs=graphs)


def dispatcher_of(
    graphs: Mapping[str, GraphCapture], variants: Sequence[str], name: str
) -> Dispatcher:
    """Return the dispatcher that picks the variant of one of the job's graphs in one mode.

    Args:
        graphs: captured graphs with guards.
        variants: names of all variants except the first, in order.
        name: name of the graph in its first variant.
    """
    guards_by_variant: dict[str, tuple[Guard, ...]] = {}
    for variant in ("", *variants):
        guard = graphs[f"{name}-{variant}" if variant else name].guard
        assert guard is not None, "every graph was given one"
        guards_by_variant[variant] = (guard,)
    guards = [graph.guard for graph in graphs.values() if graph.guard is not None]
    entry_names = {
        entry for guard in guards for entry in (*(i.name for i in guard.inputs), *guard.constants)
    }
    return Dispatcher(name, guards_by_variant, ignored=entry_names)


def _check_order(graphs: Mapping[str, GraphCapture], targets: Sequence[Target]) -> None:
    variants = tuple(dict.fromkeys(target.variant for target in targets if target.variant))
    selected: dict[str, set[str]] = {}
    for target in targets:
        if target.training:
            first = dispatcher_of(graphs, variants, target.graph).pick(target.batch)
            selected.setdefault(target.variant, set()).add(first)
    for variant, variants_selected in selected.items():
        if variant and variant not in variants_selected:
            other = min(variants_selected)
            raise JobError(
                "the variant would never be selected for its own example, because an earlier one"
                " accepts that batch",
                where=f"Job.variants[{variant!r}]",
                expected="an input, constant or shape that differs from the earlier variants",
                got=(
                    "a batch that"
                    f" {f'the variant {other!r}' if other else 'the first variant, of Job.batch,'}"
                    " accepts"
                ),
                hint="Omit it, or put it first (Job.batch) if its graph is the one to run.",
            )


def size_guard(
    exported: ExportedProgram, captured: GraphCapture, example: Mapping[str, Tensor]
) -> Guard:
    """Return the guard on a graph's sizes, without constants and absent inputs.

    Args:
        exported: the graph's training IR, as torch.export returned it.
        captured: the captured graph, for its inputs, in order, and the names of their sizes.
        example: example of its inputs.
    """
    return _Reader(exported, captured, example).guard()


class _Reader:
    """Translator of torch's symbols, ranges and conditions into the names and the grammar of a
    guard.
    """

    def __init__(
        self, exported: ExportedProgram, captured: GraphCapture, example: Mapping[str, Tensor]
    ) -> None:
        self._exported, self._example = exported, example
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        values = [
            node.meta["val"]
            for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True)
            if spec.kind is InputKind.USER_INPUT
        ]
        self._sizes: dict[tuple[str, int], Any] = {}
        self._names: dict[str, str] = {}
        for spec, value in zip(captured.inputs, values, strict=True):
            for dim, size in enumerate(value.shape):
                expression = size if isinstance(size, int) else size.node.expr
                self._sizes[spec.name, dim] = expression
                if not isinstance(expression, int) and expression.is_Symbol:
                    self._names[str(expression)] = str(spec.shape[dim])
        for (name, dim), expression in self._sizes.items():
            for symbol in (
                [] if isinstance(expression, int) else sorted(map(str, expression.free_symbols))
            ):
                self._names.setdefault(symbol, f"{name}_{dim}_unit")
        self._captured = captured
        self._pinned: set[str] = set()

    def guard(self) -> Guard:
        texts = {place: self._text(place) for place in self._sizes}
        self._pin_undetermined_sizes(texts)
        ranges = {name: self._range(symbol) for symbol, name in self._names.items()}
        codes = [
            _FLAT.sub(lambda m: f"L['batch']['{self._captured.inputs[int(m[1])].name}']", c)
            for c in size_conditions(self._exported)
        ]
        conditions = [
            condition
            for code in codes
            if (condition := self._condition(code, texts, ranges)) is not None
        ]
        values = self._values(texts)
        for name in self._pinned:
            ranges[name] = (values[name], values[name])
        inputs = [
            InputGuard(i.name, i.dtype, tuple(texts[i.name, dim] for dim in range(len(i.shape))))
            for i in self._captured.inputs
        ]
        return Guard(tuple(inputs), dict(sorted(ranges.items())), tuple(dict.fromkeys(conditions)))

    def _text(self, place: tuple[str, int]) -> SizeLike:
        expression = self._sizes[place]
        # Dim.AUTO turns `s0 == 8` into a constant and `s1 == 2 * s0` into a size that is an
        # expression; `s0 % 2 == 0` becomes a condition. Its ranges begin at 2.
        # A dim that became a constant may still be a SymInt, with a constant expression.
        if isinstance(expression, int) or expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self._names[str(expression)]
        symbols = sorted(expression.free_symbols, key=str)
        if (
            len(symbols) == 1
            and expression.is_polynomial(*symbols)
            and expression.as_poly(*symbols).degree() == 1
        ):
            factor, offset = (int(number) for number in expression.as_poly(*symbols).all_coeffs())
            whole = f"{factor}*" if factor != 1 else ""
            return f"{whole}{self._names[str(symbols[0])]}" + (
                f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else ""
            )
        text = re.sub(r"[a-z]+\d+", lambda m: self._names.get(m[0], m[0]), str(expression))
        try:
            parse(text)
        except GrammarError:  # pinning the size is narrower than necessary, but correct
            self._pinned.update(self._names[str(symbol)] for symbol in symbols)
            return self._example[place[0]].shape[place[1]]
        return text

    def _pin_undetermined_sizes(self, texts: dict[tuple[str, int], SizeLike]) -> None:
        """Pin sizes to the example's where they use symbols that no size determines."""
        determined = {
            s.symbols[0]
            for t in texts.values()
            if isinstance(t, str) and (s := parse(t)).affine() is not None
        }
        for place, text in texts.items():
            if isinstance(text, str) and set(parse(text).symbols) - determined:
                texts[place] = self._example[place[0]].shape[place[1]]
        for symbol in [symbol for symbol, name in self._names.items() if name not in determined]:
            del self._names[symbol]

    def _range(self, symbol: str) -> tuple[int, int | None]:
        spans = {
            str(torch_symbol): span
            for torch_symbol, span in self._exported.range_constraints.items()
        }
        least, most = (
            (str(spans[symbol].lower), str(spans[symbol].upper)) if symbol in spans else ("0", "")
        )
        return (int(least) if least.isdigit() else 0), (int(most) if most.isdigit() else None)

    def _values(self, texts: Mapping[tuple[str, int], SizeLike]) -> dict[str, int]:
        """Return the example's value of each symbol."""
        values: dict[str, int] = {}
        for (name, dim), text in texts.items():
            if isinstance(text, str) and (line := parse(text).affine()) is not None:
                values[parse(text).symbols[0]] = (self._example[name].shape[dim] - line[1]) // line[
                    0
                ]
        return values

    def _condition(
        self,
        code: str,
        texts: Mapping[tuple[str, int], SizeLike],
        ranges: Mapping[str, tuple[int, int | None]],
    ) -> str | None:
        """Return one of torch's conditions in the guard's grammar, or None if the sizes and ranges
        imply it.
        """
        places: Sequence[tuple[str, int]] = [(m[1], int(m[2])) for m in _SIZE.finditer(code)]

        def size(match: re.Match[str]) -> str:
            text = str(texts[match[1], int(match[2])])
            return text if re.fullmatch(r"[\w.]+", text) else f"({text})"

        text = _EXTREME.sub(r"\1(", _SIZE.sub(size, code))
        try:
            parsed = parse(text)
        except GrammarError:
            # A condition that the grammar cannot express pins its sizes to the example's. The batch
            # dim is declared dynamic, so torch would have rejected a condition on it alone.
            dynamic = {
                symbol
                for place in places
                if isinstance(expression := texts[place], str)
                for symbol in parse(expression).symbols
            }
            self._pinned |= dynamic - {"batch"}
            return None
        if not parsed.symbols or _is_trivial(text) or _is_implied(text, ranges):
            return None
        assert parsed.value(self._values(texts)), f"the example does not fulfil {text}"
        return text


def _is_trivial(text: str) -> bool:
    sides = _SAME.fullmatch(text)
    return sides is not None and sides["left"].strip() == sides["right"].strip()


def _is_implied(text: str, ranges: Mapping[str, tuple[int, int | None]]) -> bool:
    """Return True if a condition says no more than the ranges."""
    match = _RANGE.fullmatch(text)
    if match is None or match["symbol"] not in ranges:
        return False
    (least, most), limit = ranges[match["symbol"]], int(match["limit"])
    if match["sign"] in (">", ">="):
        return least >= limit + (match["sign"] == ">")
    return most is not None and most <= limit - (match["sign"] == "<")
