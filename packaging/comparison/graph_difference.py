"""Differences between two graphs: operators, nodes by module, sizes of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from trainload.packaging.comparison.graph_lines import GraphLines, Line
from trainload.packaging.comparison.json_change import Change

MOST_PAIRS = 50_000
"""Maximum number of pairs of equal lines in a module for a sequence diff (about a second).

For modules with more, only the number of times that each line occurs is compared.
"""


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node that exists only before ("-") or only after ("+")."""

    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The nodes of one module that differ, in order.

    The module "" is the model itself, or the loss.
    """

    module: str
    lines: tuple[NodeLine, ...]


@dataclass(frozen=True, slots=True)
class GraphDifference:
    """The differences between two graphs of the same name.

    Attributes:
        name: name of the graph: "train", "update-rest-first".
        operators: number of calls of each operator before and after, where they differ.
        modules: nodes that were added or removed.
        values: values with changed dtypes or sizes, of nodes that are in both graphs.
        unseen: True if the files differ only in other ways: in names, strides or similar.
    """

    name: str
    operators: tuple[Change, ...]
    modules: tuple[ModuleDifference, ...]
    values: tuple[Change, ...]
    unseen: bool


def graph_difference(name: str, before: GraphLines, after: GraphLines) -> GraphDifference:
    """Compare the lines of two graphs whose files differ."""
    calls = sorted({*before.calls, *after.calls})
    counts = (
        (operator, before.calls.get(operator, 0), after.calls.get(operator, 0))
        for operator in calls
    )
    operators = tuple(
        Change(operator, str(was) if was else None, str(now) if now else None)
        for operator, was, now in counts
        if was != now
    )
    modules: list[ModuleDifference] = []
    values: list[Change] = []
    lines_before, lines_after = _by_module(before), _by_module(after)
    for module in dict.fromkeys([*lines_before, *lines_after]):
        lines, other = _compare_modules(lines_before.get(module, []), lines_after.get(module, []))
        if lines:
            modules.append(ModuleDifference(module, tuple(lines)))
        values += other
    return GraphDifference(
        name, operators, tuple(modules), tuple(values), not (operators or modules or values)
    )


def _by_module(graph: GraphLines) -> dict[str, list[Line]]:
    lines_by_module: dict[str, list[Line]] = {}
    for line in graph.lines:
        lines_by_module.setdefault(line.module, []).append(line)
    return lines_by_module


def _compare_modules(
    before: Sequence[Line], after: Sequence[Line]
) -> tuple[list[NodeLine], list[Change]]:
    start = 0
    while start < min(len(before), len(after)) and before[start].text == after[start].text:
        start += 1
    end = 0
    while (
        end < min(len(before), len(after)) - start and before[-1 - end].text == after[-1 - end].text
    ):
        end += 1
    same = [*zip(before[:start], after[:start], strict=True)]
    a, b = before[start : len(before) - end], after[start : len(after) - end]
    lines: list[NodeLine] = []
    often = Counter(line.text for line in b)
    if sum(often[line.text] for line in a) > MOST_PAIRS:
        lines += _compare_counts(a, b)
    else:
        for tag, i, j, k, m in SequenceMatcher(
            None, [line.text for line in a], [line.text for line in b], autojunk=False
        ).get_opcodes():
            if tag == "equal":
                same += zip(a[i:j], b[k:m], strict=True)
            else:
                lines += [NodeLine("-", _format_line(line)) for line in a[i:j]] + [
                    NodeLine("+", _format_line(line)) for line in b[k:m]
                ]
    same += zip(before[len(before) - end :], after[len(after) - end :], strict=True)
    return lines, [
        Change(_format_location(x), x.values or None, y.values or None)
        for x, y in same
        if x.values != y.values
    ]


def _compare_counts(before: Sequence[Line], after: Sequence[Line]) -> Iterator[NodeLine]:
    was, now = Counter(map(_format_line, before)), Counter(map(_format_line, after))
    for mark, more, fewer in (("-", was, now), ("+", now, was)):
        for text, count in (more - fewer).items():
            yield NodeLine(mark, text if count == 1 else f"{text} ({count} times)")


def _format_line(line: Line) -> str:
    return f"{line.text} -> {line.values}" if line.values else line.text


def _format_location(line: Line) -> str:
    return f"{line.module}: {line.text}" if line.module else line.text
