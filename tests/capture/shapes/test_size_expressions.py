"""The grammar of sizes and conditions in guards."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainload.capture.guards.size_expressions import MAX_LENGTH, GrammarError, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("a + 2*b", 16),
        ("a - b - 1", -6),
        ("-3 + a", -1),
        ("b // 2 % 2", 1),
        ("(a + b) * 2", 18),
        ("max(a, b, 3)", 7),
        ("min(a, 1)", 1),
        ("a < b", True),
        ("a % 2 == 0 and b != 7", False),
        ("not a == b or b < a", True),
        ("2*mask.left_1", 22),
        ("pair.0_1 + 1", 14),
    ],
)
def test_a_text_means_what_it_does_in_python(text: str, value: int) -> None:
    assert parse(text).value({"a": 2, "b": 7, "mask.left_1": 11, "pair.0_1": 13}) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "a +",
        "(a",
        "a)",
        "1.5",
        "a ** b",
        "__import__('os')",
        "a[0]",
        "a if b else c",
        "lambda: 1",
        "x(1)",
        "max()",
        "and",
        "a < b < c",
        "1e9",
        "é",
        "a;b",
        "a\x00b",
        "123456789012345678901234567890",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        parse(text)


def test_a_deeply_nested_text_is_refused() -> None:
    with pytest.raises(GrammarError, match="deep"):
        parse("(" * 100 + "a" + ")" * 100)


def test_a_long_text_is_refused() -> None:
    with pytest.raises(GrammarError, match="longer"):
        parse("a" * (MAX_LENGTH + 1))


@pytest.mark.parametrize(
    "text",
    ["+".join(["a"] * 2000), "-" * 4000 + "a", "not " * 1000 + "a", " or ".join(["a"] * 800)],
)
def test_the_longest_texts_are_evaluated(text: str) -> None:
    assert parse(text).value({"a": 1})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a", (1, 0)),
        ("2*a", (2, 0)),
        ("2*a - 3", (2, -3)),
        ("a + 1", (1, 1)),
        ("0*a", None),
        ("a*b", None),
        ("a // 2", None),
    ],
)
def test_a_line_is_seen(text: str, line: tuple[int, int] | None) -> None:
    assert parse(text).affine() == line


@settings(max_examples=40)
@given(st.text(alphabet="ab01 +-*/%<>=!(),.maxinotrd", max_size=40))
def test_a_text_is_refused_or_has_a_value(text: str) -> None:
    try:
        parsed = parse(text)
    except GrammarError:
        return
    with contextlib.suppress(ZeroDivisionError):
        assert isinstance(parsed.value(dict.fromkeys(parsed.symbols, 3)), int)
