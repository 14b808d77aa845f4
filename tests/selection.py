"""Which tests `make test` runs: the markers that its selection goes by, set where a test's cases or
fixtures decide.

    @pytest.mark.matrix("zero3-gpt", "single-*")          # ids of cases; `*` stands for anything
    @pytest.mark.matrix(kind=lambda case: case.cause)     # the first case of each kind
    @pytest.mark.matrix(when=lambda case: case in SMALL)  # those for which this holds
    @pytest.mark.parametrize("case", CASES)
    def test_...

Every other case of a matrix is marked `slow`, so `make test-long` runs it. Whatever uses the
fixture `ray_cluster` is marked `ray`, and whatever is marked `ray` is marked `alone`: it runs when
no other test does. A file with such tests says so somewhere (`ray_cluster`, `mark.ray`,
`mark.alone`), so that a run of these tests imports no other files.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

CLUSTER_FIXTURE = "ray_cluster"


def mark_items(items: Sequence[pytest.Item]) -> None:
    """Add `ray`, `alone` and `slow` to the tests that need them.

    Raises:
        pytest.UsageError: a matrix is not parametrized, or names neither ids nor a kind; or the
            file of a test on Ray does not say so.
    """
    seen: dict[str, set[Hashable]] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if CLUSTER_FIXTURE in item.fixturenames:
            item.add_marker(pytest.mark.ray)
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("alone") is not None and not may_have_alone(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} needs a Ray cluster by a fixture of another file: mark it with"
                " pytest.mark.ray"
            )
        matrix = item.get_closest_marker("matrix")
        if matrix is not None and not _is_representative(
            item, matrix, seen.setdefault(_function_of(item), set())
        ):
            item.add_marker(pytest.mark.slow)


def may_have_alone(path: Path) -> bool:
    """Return whether a test file may have tests that are marked `alone`."""
    text = path.read_text()
    return any(word in text for word in (CLUSTER_FIXTURE, "mark.ray", "mark.alone"))


def may_be_selected(path: Path, expression: str) -> bool:
    """Return whether a file may have tests that `-m expression` selects: False where all of these
    are `alone` and the file has none.
    """
    wants_alone = (
        re.fullmatch(r"(.+ and )?(alone|ray)", expression) is not None and " or " not in expression
    )
    return (
        not wants_alone
        or not path.name.startswith("test_")
        or path.suffix != ".py"
        or may_have_alone(path)
    )


def unmatched_patterns(items: Sequence[pytest.Item]) -> list[str]:
    """Return "test: pattern" for each pattern of a matrix that no case of its test matches."""
    cases: dict[tuple[str, str], bool] = {}
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix is None or not isinstance(item, pytest.Function):
            continue
        for pattern in matrix.args:
            key = (_function_of(item), pattern)
            cases[key] = cases.get(key, False) or fnmatchcase(_case_id(item), pattern)
    return [
        f"{function}: {pattern}" for (function, pattern), matched in cases.items() if not matched
    ]


def selected(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Return the values of a parameter that the tests of a fixture's scope have, so that a fixture
    that serves all of them does no more.

    Tests of other files may call other things by the same name: a fixture of a module hears of its
    module's alone.
    """
    items = [
        item
        for item in request.session.items
        if hasattr(item, "callspec") and request.node in item.listchain()
    ]
    return {item.callspec.params[parameter] for item in items if parameter in item.callspec.params}


def _is_representative(item: pytest.Function, matrix: pytest.Mark, seen: set[Hashable]) -> bool:
    case = _case_id(item)
    if matrix.args:
        return any(fnmatchcase(case, pattern) for pattern in matrix.args)
    decide = matrix.kwargs.get("when") or matrix.kwargs.get("kind")
    if decide is None:
        raise pytest.UsageError(
            f"{item.nodeid}: mark.matrix needs ids of cases, a kind or a condition"
        )
    value = decide(*(item.callspec.params[name] for name in inspect.signature(decide).parameters))
    if "when" in matrix.kwargs:
        return bool(value)
    first = value not in seen
    seen.add(value)
    return first


def _function_of(item: pytest.Function) -> str:
    return item.nodeid.partition("[")[0]


def _case_id(item: pytest.Function) -> str:
    if not hasattr(item, "callspec"):
        raise pytest.UsageError(f"{item.nodeid}: mark.matrix is for parametrized tests")
    return item.callspec.id
