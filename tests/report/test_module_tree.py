"""The tree of modules of a graph page."""

from __future__ import annotations

import pytest

from trainload.capture.program import ParameterSpec
from trainload.packaging.format.source_map import Place
from trainload.report.packages.module_tree import Budget, Module, Operator, module_tree
from trainload.report.packages.step_costs import Cost

FILES = {"/src/model.py": "model.py"}


def operator(text: str, module: str, line: int = 1) -> Operator:
    return Operator(text, module, Place(module, "/src/model.py", line, f"line {line}", True))


def tree(
    *operators: Operator,
    parameters: tuple[ParameterSpec, ...] = (),
    costs: dict[tuple[str, str], Cost] | None = None,
    budget: int = 10**6,
) -> Module:
    return module_tree(operators, parameters, {}, costs or {}, FILES, Budget(budget))


def weight(name: str, alias_of: str | None = None) -> ParameterSpec:
    return ParameterSpec(name, "float32", (4, 8), True, alias_of)


def test_a_module_counts_the_operators_of_its_submodules() -> None:
    root = tree(operator("a", "layers.0.fc"), operator("b", "layers.0"), operator("c", ""))
    assert [module.operators for module in root.walk()] == [3, 2, 2, 1]


def test_operators_of_one_line_are_listed_together() -> None:
    root = tree(operator("a", "fc", 3), operator("b", "fc", 7), operator("c", "fc", 3))
    lines = root.children["fc"].lines.values()
    assert [(line.place, line.operators) for line in lines] == [
        ("model.py:3", ["a", "c"]),
        ("model.py:7", ["b"]),
    ]


def test_a_tied_parameter_counts_once() -> None:
    root = tree(parameters=(weight("embed.weight"), weight("head.weight", "embed.weight")))
    assert (root.elements, root.bytes) == (32, 128)


def test_costs_of_a_line_are_those_of_its_module_too() -> None:
    place = "/src/model.py:3: line 3"
    root = tree(operator("a", "fc", 3), costs={("fc", place): Cost(10.0, 20.0, 64, 2)})
    line = root.children["fc"].lines[place]
    assert line.cost == root.children["fc"].cost == root.cost == Cost(10.0, 20.0, 64, 2)


def test_costs_without_a_line_count_in_their_module() -> None:
    root = tree(operator("a", "fc"), costs={("fc", ""): Cost(saved=64)})
    assert root.children["fc"].cost.saved == 64


def test_operators_beyond_the_budget_are_counted_but_not_listed() -> None:
    root = tree(*(operator("x" * 100, "fc") for _ in range(100)), budget=2_000)
    fc = root.children["fc"]
    listed = sum(len(line.operators) for line in fc.lines.values())
    assert 0 < listed < 20
    assert (fc.operators, fc.hidden) == (100, 100 - listed)


def test_escaped_characters_cost_what_they_take_in_the_page() -> None:
    budget = Budget(10_000)
    assert not budget.spend("<" * 2_500)


@pytest.mark.parametrize(
    "path", [".".join(map(str, range(100_000))), "x" * 100_000], ids=["deep", "long"]
)
def test_a_hostile_path_makes_few_modules_with_short_names(path: str) -> None:
    root = tree(operator("a", path))
    names = [module.name for module in root.walk()]
    assert len(names) <= 20
    assert max(map(len, names)) <= 160


def test_many_modules_end_in_one_that_has_the_other_operators() -> None:
    root = tree(*(operator("a", f"m{number}") for number in range(6_000)))
    assert sum(1 for _ in root.walk()) == 5_000
    assert root.operators == 6_000
