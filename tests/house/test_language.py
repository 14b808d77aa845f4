"""Docs, help, messages and docstrings are plain English: they avoid a short list of phrases."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.house.source import ROOT, face_files, stage_files

GENERATED = ("coverage.md", "errors_before_after.md", "grid.md", "hostile.md")
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED),
]
SOURCES = [*stage_files(), *face_files()]
BANNED = {
    r"befall\w*|befell": "fault tolerance, failures",
    r"that there (?:is|are) not": "unknown",
    r"so-manieth": "n-th",
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:goes|gone|go|went) on with": "continue, resume",
    r"without end": "too many attempts",
    r"hand(?:s|ed) on": "pass",
    r"kept back": "held out",
    r"of several that": "if several do so concurrently",
    r"who(?:ever)? asks": "the caller",
    r"sees to it": "ensures",
    r"to be had": "available",
    r"taken? for dead": "considered dead",
    r"tell(?:s)? apart|reckon\w*": "distinguish, compute",
}
"""Pattern of whole words -> what to write instead."""
NOT_VERBS = re.compile(
    "A|All|An|By|Each|Every|For|From|If|In|Its?|Like|No|On|One|So|That|The|These"
)
"""Words with which the docstring of a function must not begin."""


def banned_phrases(path: Path) -> list[str]:
    """Return "line: phrase" for each banned phrase of a file, across line breaks too."""
    text = path.read_text()
    found = []
    for pattern in BANNED:
        spaced = pattern.replace(" ", r"[\s#]+")
        found += [
            f"{text[: m.start()].count(chr(10)) + 1}: {m[0]}"
            for m in re.finditer(rf"\b(?:{spaced})\b", text, re.IGNORECASE)
        ]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_plain_english(path: Path) -> None:
    assert banned_phrases(path) == []


def test_docstrings_messages_and_help_are_plain_english() -> None:
    assert {
        str(path.relative_to(ROOT)): phrases
        for path in SOURCES
        if (phrases := banned_phrases(path))
    } == {}


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    first = re.compile(r'^\s*(?:"""|r""")(What|Whether|As|Of|How|Where|Who|When)\b', re.MULTILINE)
    assert {
        str(path.relative_to(ROOT)): words
        for path in SOURCES
        if (words := first.findall(path.read_text()))
    } == {}


def noun_phrases(path: Path) -> list[str]:
    """Return "line: word" for each function whose docstring begins with a noun phrase."""
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and not any(map(is_attribute, node.decorator_list))
    ]
    return [
        f"{node.lineno}: {word}"
        for node in functions
        if NOT_VERBS.fullmatch(word := (ast.get_docstring(node) or "-").split()[0])
    ]


def is_attribute(decorator: ast.expr) -> bool:
    """Return True if a decorator makes a function an attribute, which is named by a noun."""
    return "property" in ast.unparse(decorator)


def test_a_functions_docstring_begins_with_a_verb() -> None:
    paths = [*SOURCES, *(ROOT / "examples").rglob("*.py")]
    assert {
        str(path.relative_to(ROOT)): words for path in paths if (words := noun_phrases(path))
    } == {}


def test_a_noun_phrase_is_seen(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text('def f():\n    """The number."""\n')
    assert noun_phrases(tmp_path / "module.py") == ["1: The"]


def test_a_banned_phrase_is_seen_across_lines(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("It goes on\nwith the run.\n")
    assert banned_phrases(tmp_path / "page.md") == ["1: goes on\nwith"]
