"""Reference pages of exceptions and environment variables have all of them."""

from __future__ import annotations

import re

from tests.house.errors_page import PAGE, exceptions, with_table
from tests.house.source import ROOT, stage_files

import trainload
from trainload.core import errors

ENVIRONMENT = (ROOT / "docs" / "reference" / "environment.md").read_text()
INTERNAL = {"TRAINLOAD_KEPT", "TRAINLOAD_DESCRIBED_GPU", "TRAINLOAD_FOLDER"}
"""Variables that processes of trainload set for each other, and a constant."""


def variables(pattern: str) -> set[str]:
    """Return the names in the sources that match a pattern."""
    sources = [*stage_files(), *(ROOT / "src" / "trainload").rglob("*.py")]
    return {name for path in sources for name in re.findall(pattern, path.read_text())}


def test_the_page_of_errors_has_the_table_of_the_exceptions() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run: python -m tests.house.errors_page"


def test_every_exception_is_a_public_name() -> None:
    assert {kind.__name__ for kind in exceptions()} - set(trainload.__all__) == set()


def test_the_tree_of_exceptions_has_each_of_them() -> None:
    tree = errors.__doc__ or ""
    assert [kind.__name__ for kind in exceptions() if f" {kind.__name__} " not in tree] == []


def test_the_page_of_variables_has_each_of_trainload() -> None:
    read = variables(r"\bTRAINLOAD_[A-Z_]+\b") - INTERNAL
    assert {name for name in read if f"| `{name}` |" not in ENVIRONMENT} == set()


def test_the_page_of_variables_names_no_other_of_trainload() -> None:
    named = set(re.findall(r"\bTRAINLOAD_[A-Z_]+\b", ENVIRONMENT))
    assert named - variables(r"\bTRAINLOAD_[A-Z_]+\b") == set()


def test_the_page_of_variables_has_each_that_is_read_by_name() -> None:
    read = variables(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"(?!\] =)")
    assert {name for name in read if f"`{name}`" not in ENVIRONMENT} == set()
