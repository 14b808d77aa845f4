"""The modules of a training graph as a tree: operators by source line, parameters, and totals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainload.capture.program import ParameterSpec
from trainload.packaging.format.source_map import Place
from trainload.report.frame.words import sanitize
from trainload.report.packages.step_costs import Cost, Origin
from trainload.sharding.plans.buckets import item_bytes

_MOST_TEXT = 3_500_000
"""Characters of operators, lines and parameters that a page lists; totals cover the others too."""
_MOST_MODULES, _DEEPEST = 5_000, 16
"""Number of modules of a tree, and their depth. Deeper ones are listed with their path."""
_LONGEST_NAME, _LONGEST_SOURCE, _LONGEST_OPERATOR = 160, 300, 400
_MARKUP = 120
"""Characters of markup around one text."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a captured graph: its text, its module and the place of its source line."""

    text: str
    module: str
    place: Place | None

    @property
    def line(self) -> str:
        """Its source line as in the origins of `costs_by_origin`."""
        place = self.place
        return "" if place is None or not place.file else f"{place.file}:{place.line}: {place.text}"


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, and where a plan has it; both are "" without a plan.

    Attributes:
        name: its name within its module.
        shape: its shape.
        dtype: its dtype.
        bytes: its size, 0 for an alias.
        bucket: name of its bucket.
        division: its division on the tensor axis; "" if each rank has all of it.
    """

    name: str
    shape: str
    dtype: str
    bytes: int
    bucket: str = ""
    division: str = ""


@dataclass(slots=True)
class SourceLine:
    """A line of a module's source, and the operators that come from it."""

    place: str
    source: str
    operators: list[str]
    cost: Cost


@dataclass(slots=True)
class Module:
    """A module: what is its own, its submodules, and totals of both.

    Attributes:
        name: the last part of its path.
        lines: source lines, in the order of their first operators.
        weights: parameters of its own.
        children: submodules, in the order of their first operators.
        operators: number of operators.
        elements: number of elements of parameters.
        bytes: size of the parameters.
        cost: costs of the operators.
        hidden: number of its own operators that are not listed, since the page would be too large.
    """

    name: str
    lines: dict[str, SourceLine] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    children: dict[str, Module] = field(default_factory=dict)
    operators: int = 0
    elements: int = 0
    bytes: int = 0
    cost: Cost = field(default_factory=Cost)
    hidden: int = 0

    def walk(self) -> Iterator[Module]:
        """Yield the module and all modules within it."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class Budget:
    """The text that a page may still list."""

    def __init__(self, characters: int = _MOST_TEXT) -> None:
        self._left = characters

    def spend(self, *texts: str) -> bool:
        """Return True if these texts may be listed too."""
        # "&" takes five characters as "&amp;", and so on
        escaped = sum(len(text.encode()) + 4 * sum(map(text.count, "&<>\"'")) for text in texts)
        self._left -= escaped + _MARKUP
        return self._left >= 0


def module_tree(
    operators: Iterable[Operator],
    parameters: Iterable[ParameterSpec],
    placed: Mapping[str, tuple[str, str]],
    costs: Mapping[Origin, Cost],
    files: Mapping[str, str],
    budget: Budget,
) -> Module:
    """Return the root of a graph's modules.

    Args:
        operators: the graph's operators, in order.
        parameters: the parameters that it uses.
        placed: parameter -> bucket and division in a plan.
        costs: result of `costs_by_origin` for the graph.
        files: path of a source file -> its name in the page.
        budget: text that may be listed.
    """
    tree = _Tree(budget)
    for operator in operators:
        tree.add_operator(operator, files)
    for parameter in parameters:
        tree.add_parameter(parameter, placed.get(parameter.name, ("", "")))
    for (module, line), cost in costs.items():
        tree.add_cost(module, line, cost)
    return tree.root


class _Tree:
    def __init__(self, budget: Budget) -> None:
        self.root = Module("")
        self._budget = budget
        self._count = 1

    def add_operator(self, operator: Operator, files: Mapping[str, str]) -> None:
        path = self._path(operator.module)
        for module in path:
            module.operators += 1
        own, key = path[-1], operator.line
        text = sanitize(operator.text, _LONGEST_OPERATOR)
        if key not in own.lines:
            place = operator.place
            # a path with control characters is in `files` as it was, and in a place without them
            name = "" if place is None or not place.file else files.get(place.file, place.file)
            where = f"{sanitize(name, _LONGEST_NAME)}:{place.line}" if place and name else ""
            source = sanitize(place.text, _LONGEST_SOURCE) if place is not None else ""
            if not self._budget.spend(where, source, text):
                own.hidden += 1
                return
            own.lines[key] = SourceLine(where, source, [], Cost())
        elif not self._budget.spend(text):
            own.hidden += 1
            return
        own.lines[key].operators.append(text)

    def add_parameter(self, parameter: ParameterSpec, placed: tuple[str, str]) -> None:
        module, _, name = parameter.name.rpartition(".")
        path = self._path(module)
        elements = 0 if parameter.alias_of is not None else math.prod(parameter.shape)
        size = elements * item_bytes(parameter.dtype)
        for each in path:
            each.elements += elements
            each.bytes += size
        shape = " x ".join(map(str, parameter.shape)) or "1"
        text = sanitize(name, _LONGEST_NAME)
        if parameter.alias_of is not None:
            text += f", the same tensor as {sanitize(parameter.alias_of, _LONGEST_NAME)}"
        if self._budget.spend(text, shape, *placed):
            path[-1].weights.append(Weight(text, shape, parameter.dtype, size, *placed))

    def add_cost(self, module: str, line: str, cost: Cost) -> None:
        path = self._path(module)
        for each in path:
            each.cost.add(cost)
        if line in path[-1].lines:
            path[-1].lines[line].cost.add(cost)

    def _path(self, dotted: str) -> Sequence[Module]:
        """Return the modules from the root to the one of a path, which are made as needed."""
        path = [self.root]
        for name in _names(dotted):
            child = path[-1].children.get(name)
            if child is None:
                if self._count >= _MOST_MODULES:
                    break
                self._count += 1
                child = path[-1].children[name] = Module(sanitize(name, _LONGEST_NAME))
            path.append(child)
        return path


def _names(dotted: str) -> list[str]:
    names = dotted.split(".") if dotted else []
    return names if len(names) <= _DEEPEST else [*names[:_DEEPEST], ".".join(names[_DEEPEST:])]
