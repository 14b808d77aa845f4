from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy import functions

from trainload.core.errors import UnsafePackageError
from trainload.packaging.graphs.expressions import check_expression

S0 = "Symbol('s0', positive=True, integer=True)"


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Symbol("s77", positive=True, integer=True) * 2 + 1,
        sympy.Symbol("u0", integer=True) ** 2 - 3,
        sympy.Max(1, sympy.Symbol("s1", integer=True)),
        functions.FloorDiv(sympy.Symbol("s1", integer=True, positive=True) + 1, 2),
        functions.PythonMod(sympy.Symbol("s1", integer=True, positive=True), 8),
        sympy.Eq(sympy.Symbol("s0", integer=True), 4),
        sympy.Symbol("s0", integer=True) >= 2,
        sympy.And(sympy.Symbol("s0", integer=True) >= 2, sympy.Symbol("s1", integer=True) < 5),
        sympy.Float(0.5) * sympy.Symbol("s0", integer=True),
        sympy.true,
        sympy.Integer(-7),
    ],
)
def test_what_torch_writes_is_in_the_grammar(expression: sympy.Basic) -> None:
    check_expression(sympy.srepr(expression), "graph")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Symbol('s0').__class__",
        "Symbol('s0', positive=__import__('os'))",
        "Symbol('s0; import os')",
        "(lambda: 1)()",
        "Integer(1) + Integer(2)",
        "open('/etc/passwd')",
        "eval('1')",
        "Function('f')(Integer(1))",
        "Lambda(Symbol('s0'), Integer(1))",
        "Add(*[1, 2])",
        "Integer(1); Integer(2)",
        "Integer(",
        "Integer(1))",
        "",
        "S('1')",
        "s0",
        "Float('1', dps=99)",
        "Float('1', precision=999999)",
        'Symbol("s0")',
        "Integer(0x10)",
        "factorial(Integer(100000))",
    ],
)
def test_what_sympy_would_evaluate_is_refused(text: str) -> None:
    with pytest.raises(UnsafePackageError, match="not a valid expression"):
        check_expression(text, "graph")


@pytest.mark.timeout(20)  # each takes milliseconds; evaluating them would take hours
@pytest.mark.parametrize(
    "text",
    [
        "Pow(Integer(10), Integer(64))",
        f"Pow(Pow({S0}, Integer(64)), Integer(64))",
        f"Pow({S0}, Integer(10000000))",
        f"Pow({S0}, {S0})",
        f"LShift({S0}, Integer(99999999))",
        "LShift(Integer(1), Integer(64))",
        "Integer(" + "9" * 21 + ")",
        "Add(" * 1000 + "1" + ")" * 1000,
        f"Add({', '.join([S0] * 200)})",
    ],
)
def test_what_would_take_memory_or_stack_is_refused_at_once(text: str) -> None:
    with pytest.raises(UnsafePackageError):
        check_expression(text, "graph")
