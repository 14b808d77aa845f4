"""Grammar of symbolic sizes, checked first because torch lets sympy evaluate any expression.

    expression := integer | "-" integer | float | "true" | "false" | symbol | call
    symbol     := "Symbol('" name "'" {", " assumption "=" ("True" | "False")} ")"
    call       := function "(" [expression {", " expression}] ")"
    float      := "Float('" decimal "', precision=" integer ")"

with `name` a torch symbol (letters, then digits) and `function` one of FUNCTIONS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainload.core.errors import UnsafePackageError

FUNCTIONS = frozenset(
    {"Integer", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "floor", "ceiling", "Abs"}
    | {"Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"}
    | {"And", "Or", "Not", "Piecewise", "ExprCondPair", "Where", "Identity"}
    | {
        "FloorDiv",
        "CeilDiv",
        "CleanDiv",
        "PythonMod",
        "ModularIndexing",
        "FloatTrueDiv",
        "IntTrueDiv",
    }
    | {
        "CeilToInt",
        "FloorToInt",
        "TruncToInt",
        "TruncToFloat",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
    }
    | {"LShift", "RShift", "PowByNatural", "FloatPow", "IsNonOverlappingAndDenseIndicator"}
)
"""sympy's constructors and torch's functions of sizes."""
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
_ASSUMPTIONS = frozenset(
    {
        "integer",
        "real",
        "extended_real",
        "finite",
        "positive",
        "negative",
        "nonnegative",
        "nonpositive",
        "zero",
        "nonzero",
    }
)

MAX_LENGTH = 4096
MAX_DEPTH = 32
MAX_EXPONENT = 64

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d{1,20})(?![\d.eE])|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<text>'[^'\\\n]{0,64}')|(?P<mark>[(),=]))"
)
_SYMBOL = re.compile(r"[a-z]{1,8}\d{1,6}")
_DECIMAL = re.compile(r"-?\d{1,40}(\.\d{0,40})?([eE][+-]?\d{1,3})?")


def check_expression(text: str, where: str) -> None:
    """Check that `text` is in the grammar above, and cheap to evaluate.

    Raises:
        UnsafePackageError: it is not.
    """
    _Parser(text, where).run()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Facts about an expression: its literal integer, and whether it has a symbol or a power."""

    literal: int | None = None
    symbolic: bool = False
    power: bool = False


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.text = text
        if len(text) > MAX_LENGTH:
            raise self.refuse(f"longer than {MAX_LENGTH} characters")
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.refuse(f"unexpected character at position {at}")
            kind = match.lastgroup
            assert kind is not None
            self.tokens.append((kind, match[kind]))
            at = match.end()
        self.at = 0

    def refuse(self, reason: str) -> UnsafePackageError:
        excerpt = self.text if len(self.text) <= 120 else self.text[:117] + "..."
        return UnsafePackageError(
            f"a symbolic size is not a valid expression: {reason}",
            where=self.where,
            got=repr(excerpt),
        )

    def run(self) -> None:
        self.expression(0)
        if self.at != len(self.tokens):
            raise self.refuse("unexpected text after the expression")

    def next(self, kind: str | None = None, value: str | None = None) -> str:
        if self.at == len(self.tokens):
            raise self.refuse("unexpected end")
        token_kind, text = self.tokens[self.at]
        if (kind is not None and token_kind != kind) or (value is not None and text != value):
            raise self.refuse(f"found {text!r} instead of {value or kind}")
        self.at += 1
        return text

    def peek(self, value: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] == ("mark", value)

    def expression(self, depth: int) -> _Kind:
        if depth > MAX_DEPTH:
            raise self.refuse(f"nested more than {MAX_DEPTH} deep")
        if self.at < len(self.tokens) and self.tokens[self.at][0] == "number":
            return _Kind(literal=int(self.next()))
        name = self.next("name")
        if name in ("true", "false"):
            return _Kind()
        self.next("mark", "(")
        if name == "Symbol":
            self.symbol()
            return _Kind(symbolic=True)
        if name == "Float":
            self.decimal()
            return _Kind()
        if name not in FUNCTIONS:
            raise self.refuse(f"{name} is not a known function")
        arguments: list[_Kind] = []
        while not self.peek(")"):
            if arguments:
                self.next("mark", ",")
            arguments.append(self.expression(depth + 1))
        self.next("mark", ")")
        if name == "Integer":
            if len(arguments) != 1 or arguments[0].literal is None:
                raise self.refuse("Integer takes one integer")
            return arguments[0]
        if name in _POWERS:
            # A power of a power, or of a number, could grow as large as memory; a size to a small
            # power cannot.
            if len(arguments) != 2 or not arguments[0].symbolic or arguments[0].power:
                raise self.refuse(f"{name} takes a base with a symbol and without powers")
            if arguments[1].literal is None or abs(arguments[1].literal) > MAX_EXPONENT:
                raise self.refuse(
                    f"{name} takes an integer of at most {MAX_EXPONENT} as its second argument"
                )
        return _Kind(
            symbolic=any(a.symbolic for a in arguments),
            power=name in _POWERS or any(a.power for a in arguments),
        )

    def symbol(self) -> None:
        if not _SYMBOL.fullmatch(self.next("text")[1:-1]):
            raise self.refuse("a symbol's name must be letters followed by digits")
        while self.peek(","):
            self.next("mark", ",")
            if self.next("name") not in _ASSUMPTIONS:
                raise self.refuse("unknown assumption of a symbol")
            self.next("mark", "=")
            if self.next("name") not in ("True", "False"):
                raise self.refuse("an assumption must be True or False")
        self.next("mark", ")")

    def decimal(self) -> None:
        if not _DECIMAL.fullmatch(self.next("text")[1:-1]):
            raise self.refuse("Float takes a decimal")
        if self.peek(","):
            self.next("mark", ",")
            self.next("name", "precision")
            self.next("mark", "=")
            if not 1 <= int(self.next("number")) <= 113:
                raise self.refuse("precision must be 1 to 113")
        self.next("mark", ")")
