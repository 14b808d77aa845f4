"""Expressions over metrics: their meaning, and the rejection of everything else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainload.core.errors import RequestError
from trainload.retraining.config.expression import MAX_LENGTH, parse

NAMES = ("eval.loss", "champion.eval.loss", "eval.steps", "drift.greatest")
VALUES = st.fixed_dictionaries({name: st.floats(-1e6, 1e6) for name in NAMES})


def holds(text: str, **values: float) -> bool | None:
    return parse(text, "gate.require").evaluate(
        {name.replace("__", "."): value for name, value in values.items()}
    )[0]


def test_the_example_of_the_docs_holds() -> None:
    text = "eval.loss <= champion.eval.loss * 1.01 and eval.steps >= 500"
    assert holds(text, eval__loss=1.0, champion__eval__loss=1.0, eval__steps=500.0) is True


def test_names_are_known_before_it_is_evaluated() -> None:
    assert parse("min(eval.loss, 3) < champion.eval.loss or abs(drift.x) < 1", "").names == {
        "eval.loss",
        "champion.eval.loss",
        "drift.x",
    }


def test_a_comparison_says_what_stood_on_both_sides() -> None:
    _, (comparison,) = parse("eval.loss <= champion.eval.loss * 1.01", "").evaluate(
        {"eval.loss": 2.31, "champion.eval.loss": 2.23}
    )
    assert str(comparison) == "eval.loss <= champion.eval.loss * 1.01: 2.31 <= 2.2523 is false"


def test_every_comparison_of_a_chain_is_told() -> None:
    _, found = parse("0 < eval.loss < 3", "").evaluate({"eval.loss": 4.0})
    assert [(each.text, each.holds) for each in found] == [
        ("0 < eval.loss", True),
        ("eval.loss < 3", False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "eval.loss < 3",
        "not eval.loss < 3",
        "eval.loss != eval.loss",
        "eval.loss * 0 == 0",
        "abs(eval.loss) < 3",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_lets_nobody_pass(text: str, value: float) -> None:
    assert holds(text, eval__loss=value) is None


def test_a_division_by_zero_lets_nobody_pass() -> None:
    assert holds("not eval.loss / eval.steps < 1", eval__loss=1.0, eval__steps=0.0) is None


def test_what_is_false_makes_what_is_unknown_false() -> None:
    assert holds("eval.loss < 1 and eval.steps > 5", eval__loss=math.nan, eval__steps=1.0) is False


def test_what_is_true_makes_what_is_unknown_true() -> None:
    assert holds("eval.loss < 1 or eval.steps > 5", eval__loss=math.nan, eval__steps=9.0) is True


def test_a_name_that_is_not_known_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RequestError, match=r"Did you mean eval\.loss\?"):
        parse("eval.los < 3", "gate.require").check(NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "eval.loss.__class__ < 1",
        "[x for x in y] < 1",
        "(lambda: 1) < 2",
        "f'{eval.loss}' < 1",
        "(eval := 1) < 2",
        "10 ** 10 ** 10 < 1",
        "1e308 * 10 < 1e999",
        "eval.loss < 1 if eval.steps < 1 else eval.loss < 2",
        "eval.loss and 3",
        "eval.loss",
        "eval['loss'] < 1",
        "eval.loss < 'one'",
        "eval.loss in (1, 2)",
        "eval.loss is 1",
        "print(eval.loss) < 1",
        "eval.loss() < 1",
        "abs(1, 2) < 1",
        "min(1) < 2",
        "min(*eval.loss) < 2",
        "min(1, key=eval.loss) < 2",
        "True < 2",
        "1j < 2",
        "\u0435val.loss < 1",
        "eval.loss < 1; eval.loss < 2",
        "eval.loss <",
        "",
        "(" * 300 + "eval.loss < 1" + ")" * 300,
        "not " * 60 + "eval.loss < 1",
        "-" * 100 + "eval.loss < 1",
        "eval.loss < 1" + " and eval.loss < 1" * 200,
        "eval.loss\x00 < 1",
    ],
)
def test_nothing_but_comparisons_of_numbers_is_parsed(text: str) -> None:
    with pytest.raises(RequestError, match=r"^gate\.require: an expression is not allowed"):
        parse(text, "gate.require")


def test_an_expression_has_a_greatest_length() -> None:
    parse("eval.loss < 1".ljust(MAX_LENGTH), "")
    with pytest.raises(RequestError, match="too long"):
        parse("eval.loss < 1".ljust(MAX_LENGTH + 1), "")


def numbers() -> st.SearchStrategy[str]:
    leaves = st.one_of(
        st.sampled_from(NAMES), st.integers(0, 1000).map(str), st.floats(0.001, 1000).map(repr)
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
                lambda t: f"({t[0]} {t[1]} {t[2]})"
            ),
            inner.map(lambda t: f"-{t}"),
            inner.map(lambda t: f"abs({t})"),
            st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
                lambda t: f"{t[0]}({t[1]}, {t[2]})"
            ),
        ),
        max_leaves=4,
    )


def conditions() -> st.SearchStrategy[str]:
    signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    compared = st.tuples(numbers(), signs, numbers()).map(" ".join)
    chained = st.tuples(numbers(), signs, numbers(), signs, numbers()).map(" ".join)
    return st.recursive(
        st.one_of(compared, chained),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
                lambda t: f"({t[0]}) {t[1]} ({t[2]})"
            ),
            inner.map(lambda t: f"not ({t})"),
        ),
        max_leaves=4,
    )


class Node:
    """Object whose attributes resolve dotted names in Python."""

    def __init__(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            first, _, rest = name.partition(".")
            below = {
                key.partition(".")[2]: each
                for key, each in values.items()
                if key.startswith(f"{first}.")
            }
            setattr(self, first, Node(below) if rest else value)


@given(conditions(), VALUES)
def test_it_means_what_python_means(text: str, values: dict[str, float]) -> None:
    names = {**vars(Node(values)), "abs": abs, "min": min, "max": max, "__builtins__": {}}
    assert parse(text, "").evaluate(values)[0] is eval(text, names)
