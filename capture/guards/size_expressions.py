"""Expressions and conditions over size symbols in guards.

They are parsed by their own grammar and never evaluated as Python.

    condition  := both {"or" both}
    both       := negation {"and" negation}
    negation   := "not" negation | comparison
    comparison := sum [("==" | "!=" | "<" | "<=" | ">" | ">=") sum]
    sum        := product {("+" | "-") product}
    product    := atom {("*" | "//" | "%") atom}
    atom       := "-" atom | integer | symbol | "(" condition ")"
                | ("max" | "min") "(" condition {"," condition} ")"

A symbol is a dotted name that ends in a letter, a digit or _ ("batch", "mask.left_1"). Values are
integers; True counts as 1.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MAX_LENGTH = 4096
"""Maximum length of a text in characters."""
MAX_DEPTH = 64

Values = Mapping[str, int]

_TOKEN = re.compile(
    r"\s*(?:(?P<integer>\d{1,20})(?![\w.])|(?P<name>[A-Za-z_][\w.]*)|(?P<mark>==|!=|<=|>=|//|[-+*%<>(),]))",
    re.ASCII,
)
_AFFINE = re.compile(
    r"(?:(?P<factor>\d+)\*)?[A-Za-z_][\w.]*(?: (?P<sign>[+-]) (?P<offset>\d+))?", re.ASCII
)
_WORDS = frozenset({"and", "or", "not", "max", "min"})
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SUMS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


class GrammarError(ValueError):
    """Raised for a text that is not a size expression."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed text.

    Attributes:
        text: the text.
        symbols: its symbols in order of first appearance.
        value: evaluates it for values of all its symbols; raises ZeroDivisionError.
    """

    text: str
    symbols: tuple[str, ...]
    value: Callable[[Values], int]

    def affine(self) -> tuple[int, int] | None:
        """Return (factor, offset) if written as factor*symbol + offset, factor > 0, else None."""
        match = _AFFINE.fullmatch(self.text)
        if match is None or len(self.symbols) != 1 or int(match["factor"] or 1) == 0:
            return None
        return int(match["factor"] or 1), int((match["sign"] or "+") + (match["offset"] or "0"))


def parse(text: str) -> Expression:
    """Parse an expression or a condition.

    Raises:
        GrammarError: if it is neither.
    """
    if len(text) > MAX_LENGTH:
        raise GrammarError(f"longer than {MAX_LENGTH} characters")
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.symbols: dict[str, None] = {}
        self.tokens = list(_tokens(text))
        self.at = 0
        self.depth = 0

    def run(self) -> Expression:
        value = self.condition()
        if self.at != len(self.tokens):
            raise GrammarError(
                f"unexpected {self.tokens[self.at]!r} after the end of the expression"
            )
        return Expression(self.text, tuple(self.symbols), value)

    def take(self, *choices: str) -> str | None:
        """Consume and return the next token if it is one of these, else return None."""
        if self.at < len(self.tokens) and self.tokens[self.at] in choices:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def need(self, token: str) -> None:
        if self.take(token) is None:
            raise GrammarError(f"{token!r} is missing")

    def condition(self) -> Callable[[Values], int]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise GrammarError(f"nested more than {MAX_DEPTH} levels deep")
        parts = [self.both()]
        while self.take("or"):
            parts.append(self.both())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else lambda values: any(part(values) for part in parts)

    def both(self) -> Callable[[Values], int]:
        parts = [self.negation()]
        while self.take("and"):
            parts.append(self.negation())
        return parts[0] if len(parts) == 1 else lambda values: all(part(values) for part in parts)

    def negation(self) -> Callable[[Values], int]:
        negated = False
        while self.take("not"):
            negated = not negated
        value = self.comparison()
        return (lambda values: not value(values)) if negated else value

    def comparison(self) -> Callable[[Values], int]:
        left = self.chain(_SUMS, self.product)
        sign = self.take(*_COMPARISONS)
        if sign is None:
            return left
        compare, right = _COMPARISONS[sign], self.chain(_SUMS, self.product)
        return lambda values: compare(left(values), right(values))

    def product(self) -> Callable[[Values], int]:
        return self.chain(_PRODUCTS, self.atom)

    def chain(
        self,
        signs: Mapping[str, Callable[[int, int], int]],
        part: Callable[[], Callable[[Values], int]],
    ) -> Callable[[Values], int]:
        first = part()
        others: list[tuple[Callable[[int, int], int], Callable[[Values], int]]] = []
        while (sign := self.take(*signs)) is not None:
            others.append((signs[sign], part()))
        if not others:
            return first

        def value(values: Values) -> int:  # a loop: a hostile chain is longer than Python's stack
            result = first(values)
            for combine, other in others:
                result = combine(result, other(values))
            return result

        return value

    def atom(self) -> Callable[[Values], int]:
        negative = False
        while self.take("-"):
            negative = not negative
        value = self.positive()
        return (lambda values: -value(values)) if negative else value

    def positive(self) -> Callable[[Values], int]:
        if self.take("("):
            value = self.condition()
            self.need(")")
            return value
        word = self.take("max", "min")
        if word is not None:
            self.need("(")
            parts = [self.condition()]
            while self.take(","):
                parts.append(self.condition())
            self.need(")")
            chosen = max if word == "max" else min
            return lambda values: chosen(part(values) for part in parts)
        if self.at == len(self.tokens):
            raise GrammarError("unexpected end of the expression")
        token = self.tokens[self.at]
        self.at += 1
        if token.isdigit():
            number = int(token)
            return lambda values: number
        if token in _WORDS or not (token[0].isalpha() or token[0] == "_"):
            raise GrammarError(f"unexpected {token!r} in place of a size")
        self.symbols[token] = None
        return lambda values: values[token]


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None or match[0].endswith("."):
            raise GrammarError(f"unexpected character at position {at}")
        yield match[0].strip()
        at = match.end()
