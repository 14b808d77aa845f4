"""Markers that select tests: each of these tests checks its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.selection import mark_items, may_be_selected, selected, unmatched_patterns


def is_slow(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("slow") is not None


@pytest.mark.matrix("a-*", "b-2")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_ids_name_the_representatives_of_a_matrix(
    letter: str, number: int, request: pytest.FixtureRequest
) -> None:
    assert is_slow(request) == ((letter, number) == ("b", 1))


@pytest.mark.matrix(kind=lambda number: number % 3)
@pytest.mark.parametrize("number", range(7))
def test_the_first_case_of_each_kind_represents_it(
    number: int, request: pytest.FixtureRequest
) -> None:
    assert is_slow(request) == (number >= 3)


@pytest.mark.matrix(when=lambda number: number > 4)
@pytest.mark.parametrize("number", range(7))
def test_a_condition_chooses_cases(number: int, request: pytest.FixtureRequest) -> None:
    assert is_slow(request) == (number <= 4)


def test_what_uses_the_cluster_is_marked(request: pytest.FixtureRequest) -> None:
    request.node.fixturenames.append("ray_cluster")
    mark_items([request.node])
    assert {"ray", "alone"} <= {mark.name for mark in request.node.iter_markers()}


@pytest.mark.parametrize("mark", [pytest.mark.matrix, pytest.mark.matrix()])
def test_a_matrix_without_representatives_is_an_error(
    mark: pytest.MarkDecorator, request: pytest.FixtureRequest
) -> None:
    request.node.add_marker(mark)
    with pytest.raises(
        pytest.UsageError, match=r"mark\.matrix needs ids of cases, a kind or a condition"
    ):
        mark_items([request.node])


def test_a_matrix_of_one_case_is_an_error(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.matrix("a"))
    with pytest.raises(pytest.UsageError, match=r"mark\.matrix is for parametrized tests"):
        mark_items([request.node])


@pytest.mark.parametrize("letter", ["a"])
def test_ids_that_no_case_has_are_found(letter: str, request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.matrix(letter, "z"))
    assert [line.partition(": ")[2] for line in unmatched_patterns([request.node])] == ["z"]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> set[str]:
    return selected(request, "letter") | selected(request, "strategy")


def test_a_fixture_of_a_module_hears_of_the_cases_of_its_module_alone(asked: set[str]) -> None:
    """`strategy` is also a parameter of other files."""
    assert asked == {"a", "b"}


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("not slow and alone", False),
        ("slow and ray", False),
        ("alone", False),
        ("not slow and not alone", True),
        ("not ray", True),
        ("", True),
    ],
)
def test_a_run_of_tests_that_run_alone_leaves_out_files_without_any(
    expression: str, kept: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_without.py").write_text("def test_it(): pass\n")
    (tmp_path / "test_with.py").write_text("def test_it(ray_cluster): pass\n")
    assert may_be_selected(tmp_path / "test_without.py", expression) == kept
    assert may_be_selected(tmp_path / "test_with.py", expression)


def test_a_test_on_ray_whose_file_does_not_say_so_is_an_error(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.selection.may_have_alone", lambda _: False)
    request.node.fixturenames.append("ray_cluster")
    with pytest.raises(pytest.UsageError, match="needs a Ray cluster by a fixture of another file"):
        mark_items([request.node])
