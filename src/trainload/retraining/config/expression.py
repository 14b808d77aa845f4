"""Expressions over metrics, parsed into a tree and never executed.

An example: "eval.loss <= champion.eval.loss * 1.01 and eval.steps >= 500".

    condition  = condition "or" condition | condition "and" condition | "not" condition
               | comparison | "(" condition ")"
    comparison = value (("<" | "<=" | ">" | ">=" | "==" | "!=") value)+
    value      = number | name | "-" value | value ("+" | "-" | "*" | "/") value
               | ("abs" | "min" | "max") "(" value, ... ")" | "(" value ")"

A comparison with a non-finite number is unknown, and so are expressions that depend on it: `not`,
`and` unless another part is false, `or` unless another part is true. An unknown condition does not
hold.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from trainload.core.canonical_json import nesting
from trainload.core.errors import RequestError
from trainload.core.suggestions import did_you_mean

MAX_LENGTH = 2000
_MAX_DEPTH = 50
_COMPARE: Mapping[type[ast.cmpop], tuple[str, Callable[[float, float], bool]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"abs": abs, "min": min, "max": max}
_FORM = "comparisons of numbers and metrics, with and, or, not, + - * /, abs, min and max"


@dataclass(frozen=True, slots=True)
class Comparison:
    """An evaluated comparison.

    Attributes:
        text: its text.
        left: value of its left side.
        right: value of its right side.
        holds: its result; None if a side is not finite.
    """

    text: str
    left: float
    right: float
    holds: bool | None

    def __str__(self) -> str:
        verdict = {True: "true", False: "false", None: "unknown"}[self.holds]
        sign = next(
            f" {sign} " for sign in ("<=", ">=", "==", "!=", "<", ">") if f" {sign} " in self.text
        )
        return f"{self.text}: {self.left:.6g}{sign}{self.right:.6g} is {verdict}"


class Expression:
    """A condition over named numbers.

    Attributes:
        text: its text.
        names: names that it uses.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text, self._where = text, where
        if len(text) > MAX_LENGTH:
            raise self._make_error(
                "it is too long", expected=f"at most {MAX_LENGTH} characters", got=f"{len(text)}"
            )
        if nesting(text.replace("(", "[").replace(")", "]").encode()) > _MAX_DEPTH:
            raise self._make_error(
                "it is nested too deeply", expected=f"at most {_MAX_DEPTH} levels"
            )
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = getattr(error, "offset", None)
            raise self._make_error(
                "it is not an expression" + (f", at column {column}" if column else "")
            ) from error
        self.names: frozenset[str] = frozenset(self._check(tree, 0))
        self._tree = tree

    def check(self, allowed: Collection[str]) -> None:
        """Raise RequestError, with the most similar known name, if a name is unknown."""
        for name in sorted(self.names - set(allowed)):
            raise RequestError(
                "there is no such metric",
                where=self._where,
                expected=f"one of {', '.join(sorted(allowed))}",
                got=name,
                hint=did_you_mean(name, allowed),
            )

    def evaluate(self, values: Mapping[str, float]) -> tuple[bool | None, tuple[Comparison, ...]]:
        """Return the result, None if it is unknown, and every comparison, in order.

        Args:
            values: values of all names.
        """
        comparisons: list[Comparison] = []
        return self._evaluate_condition(self._tree, values, comparisons), tuple(comparisons)

    # Parsing

    def _make_error(self, problem: str, *, expected: str = _FORM, got: str = "") -> RequestError:
        return RequestError(
            f"an expression is not allowed: {problem}",
            where=self._where,
            expected=expected,
            got=got or self.text[:200],
        )

    def _check(self, node: ast.expr, depth: int) -> set[str]:
        """Check a condition, and return its names."""
        if depth > _MAX_DEPTH:
            raise self._make_error(
                "it is nested too deeply", expected=f"at most {_MAX_DEPTH} levels"
            )
        match node:
            case ast.BoolOp(values=parts):
                return {name for part in parts for name in self._check(part, depth + 1)}
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return self._check(part, depth + 1)
            case ast.Compare(left=left, ops=ops, comparators=rights) if all(
                type(op) in _COMPARE for op in ops
            ):
                return {
                    name for part in (left, *rights) for name in self._check_value(part, depth + 1)
                }
        raise self._make_error(f"this is not a comparison: {self._source_text(node)}")

    def _check_value(self, node: ast.expr, depth: int) -> set[str]:
        """Check a numeric expression, and return its names."""
        if depth > _MAX_DEPTH:
            raise self._make_error(
                "it is nested too deeply", expected=f"at most {_MAX_DEPTH} levels"
            )
        match node:
            case ast.Constant(value=int() | float() as value) if (
                type(value) is not bool and abs(value) < 1e300
            ):
                return set()
            case ast.Name() | ast.Attribute():
                return {self._name(node)}
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=part):
                return self._check_value(part, depth + 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._check_value(left, depth + 1) | self._check_value(right, depth + 1)
            case ast.Call(func=ast.Name(id=function), args=[_, *_] as parts, keywords=[]) if (
                function in _FUNCTIONS
            ):
                if (function == "abs") == (len(parts) == 1):
                    return {name for part in parts for name in self._check_value(part, depth + 1)}
        raise self._make_error(f"this is not a number: {self._source_text(node)}")

    def _name(self, node: ast.expr) -> str:
        """Return the dotted name of a node."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._make_error(f"this is not a name: {self._source_text(node)}")
        name = ".".join((node.id, *reversed(parts)))
        if not name.isascii() or "__" in name:
            raise self._make_error(f"this is not the name of a metric: {name}")
        return name

    def _source_text(self, node: ast.expr) -> str:
        return (ast.get_source_segment(self.text.strip(), node) or type(node).__name__)[:80]

    # Evaluating

    def _evaluate_condition(
        self, node: ast.expr, values: Mapping[str, float], comparisons: list[Comparison]
    ) -> bool | None:
        match node:
            case ast.BoolOp(op=op, values=parts):
                results = [self._evaluate_condition(part, values, comparisons) for part in parts]
                decisive = isinstance(op, ast.Or)
                return (
                    decisive if decisive in results else None if None in results else not decisive
                )
            case ast.UnaryOp(operand=part):
                inner = self._evaluate_condition(part, values, comparisons)
                return None if inner is None else not inner
            case ast.Compare(left=left, ops=ops, comparators=rights):
                return self._evaluate_comparison([left, *rights], ops, values, comparisons)
        raise AssertionError("it was checked when it was parsed")

    def _evaluate_comparison(
        self,
        sides: list[ast.expr],
        ops: list[ast.cmpop],
        values: Mapping[str, float],
        comparisons: list[Comparison],
    ) -> bool | None:
        numbers = [self._evaluate_number(side, values) for side in sides]
        results: list[bool | None] = []
        for index, op in enumerate(ops):
            left, right = numbers[index], numbers[index + 1]
            sign, compare = _COMPARE[type(op)]
            holds = compare(left, right) if math.isfinite(left) and math.isfinite(right) else None
            text = f"{self._source_text(sides[index])} {sign} {self._source_text(sides[index + 1])}"
            comparisons.append(Comparison(" ".join(text.split()), left, right, holds))
            results.append(holds)
        return False if False in results else None if None in results else True

    def _evaluate_number(self, node: ast.expr, values: Mapping[str, float]) -> float:
        match node:
            case ast.Constant(value=value):
                assert isinstance(value, (int, float))
                return float(value)
            case ast.Name() | ast.Attribute():
                return values[self._name(node)]
            case ast.UnaryOp(op=op, operand=part):
                return (
                    -self._evaluate_number(part, values)
                    if isinstance(op, ast.USub)
                    else self._evaluate_number(part, values)
                )
            case ast.BinOp(left=left, op=op, right=right):
                try:
                    return _ARITHMETIC[type(op)](
                        self._evaluate_number(left, values), self._evaluate_number(right, values)
                    )
                except ZeroDivisionError:
                    return math.nan
            case ast.Call(func=ast.Name(id=function), args=parts):
                arguments = [self._evaluate_number(part, values) for part in parts]
                return (
                    math.nan
                    if any(math.isnan(each) for each in arguments)
                    else _FUNCTIONS[function](*arguments)
                )
        raise AssertionError("it was checked when it was parsed")


def parse(text: str, where: str) -> Expression:
    """Parse an expression.

    Args:
        text: its text.
        where: its location, for errors.

    Raises:
        RequestError: it is not an expression, or contains something that is not allowed.
    """
    return Expression(text, where)
