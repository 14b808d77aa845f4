"""Markers by which `make test` selects tests, set from a test's cases and fixtures.

    @pytest.mark.matrix("zero3-gpt", "single-*")          # ids of cases; `*` matches anything
    @pytest.mark.matrix(kind=lambda case: case.cause)     # the first case of each kind
    @pytest.mark.matrix(when=lambda case: case in SMALL)  # the cases for which this is true
    @pytest.mark.parametrize("case", CASES)
    def test_...

Every other case of a matrix is marked `slow`, so only `make test-long` runs it. Tests that use the
fixture `ray_cluster` are marked `ray`, and tests marked `ray` are marked `alone`: no other test
runs at the same time. A file with such tests contains `ray_cluster`, `mark.ray` or `mark.alone`, so
that a run of these tests imports no other files.
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
        pytest.UsageError: a matrix is not parametrized, or has neither ids nor a kind; or the file
            of a test on Ray does not contain one of the words above.
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
    """Return True if a test file may have tests that are marked `alone`."""
    text = path.read_text()
    return any(word in text for word in (CLUSTER_FIXTURE, "mark.ray", "mark.alone"))


def may_be_selected(path: Path, expression: str) -> bool:
    """Return True if a file may have tests that `-m expression` selects.

    The result is False if the expression selects only `alone` tests and the file has none.
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
    """Return "test: pattern" for each pattern of a matrix that matches no case of its test."""
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
    """Return the values of a parameter in the selected tests of a fixture's scope.

    A fixture that serves all of them then does no unnecessary work. In a fixture of a module,
    parameters of the same name in other files are ignored, since they may mean something else.
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
