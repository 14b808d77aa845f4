"""CHANGELOG.md has the form of Keep a Changelog."""

from __future__ import annotations

import itertools
import re

from tests.house.source import ROOT

from trainload.core.versions import VERSION

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
LONGEST = 360
"""Characters of an entry: what users notice, and where to read more."""


def releases() -> list[tuple[str, str]]:
    """Return heading and text of each release, the newest first."""
    parts = re.split(r"^## (.+)\n", TEXT, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def kinds(text: str) -> list[tuple[str, str]]:
    """Return heading and text of each kind of change in a release."""
    parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def entries() -> list[str]:
    """Return all entries, each in one line."""
    found = re.findall(r"^- (.+(?:\n  .+)*)", TEXT, re.MULTILINE)
    return [" ".join(each.split()) for each in found]


def test_the_changes_that_are_not_released_come_first() -> None:
    assert releases()[0][0] == "[Unreleased]"


def test_a_release_has_its_version_and_its_date() -> None:
    pattern = re.compile(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}")
    assert [head for head, _ in releases()[1:] if not pattern.fullmatch(head)] == []


def test_no_release_is_newer_than_the_version() -> None:
    numbers = [tuple(map(int, head[1 : head.index("]")].split("."))) for head, _ in releases()[1:]]
    assert numbers == sorted(numbers, reverse=True)
    assert all(number <= tuple(map(int, VERSION.split("."))) for number in numbers)


def test_the_kinds_of_changes_are_in_their_order_once() -> None:
    for head, text in releases():
        order = [KINDS.index(kind) for kind, _ in kinds(text)]
        assert order == sorted(set(order)), head


def test_every_heading_has_entries() -> None:
    lines = [line for line in TEXT.splitlines() if line.strip()]
    deepest = [
        first
        for first, second in itertools.pairwise(lines)
        if first.startswith("###") and not second.startswith(("- ", "####"))
    ]
    assert deepest == []


def test_an_entry_is_a_short_sentence() -> None:
    assert [each for each in entries() if len(each) > LONGEST] == []
    assert [each for each in entries() if not re.match(r"[A-Z0-9`$\[]", each)] == []
    assert [each for each in entries() if not each.endswith(".")] == []


def test_no_entry_is_repeated() -> None:
    found = entries()
    assert [each for each in set(found) if found.count(each) > 1] == []
