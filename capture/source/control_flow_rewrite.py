"""Write replacements for control flow, numbers and sizes in Python that depend on tensors.

They are built from the user's own expressions.
"""

from __future__ import annotations

import ast
import re

from trainload.capture.source.expression_spot import Spot

_WHERE = (
    "torch.where(condition, when_true, when_false)               # both are computed, one is"
    " selected\n"
    "torch.cond(condition, true_function, false_function, (x,))  # one is computed"
)
_MASK = (
    "mask = (x > 0).to(x.dtype)                            # instead of x[x > 0], x.nonzero()"
    " and their sizes\n"
    "mean = (x * mask).sum() / mask.sum().clamp(min=1)     # over the unmasked entries; 0 if"
    " there are none"
)
_ROUNDS = "in range(10):  # an upper bound of the number of iterations"
GUARD = "if not torch.compiler.is_exporting():  # in eager mode only"


# Branches


def branch(spot: Spot | None) -> str:
    """Return code that computes both outcomes of a branch on a tensor's value, as tensors."""
    owner = spot.test_of if spot is not None else None
    if owner is not None and re.search(
        r"\blen\(|\.numel\(|\.shape\b|\.size\(", ast.unparse(owner.test)
    ):
        return _MASK
    if (
        spot is not None
        and owner is not None
        and not any(isinstance(n, ast.In | ast.NotIn) for n in ast.walk(owner.test))
    ):
        return _kept(owner.test, spot) + _of_branch(owner, spot)
    return _WHERE


def _of_branch(owner: ast.If | ast.IfExp | ast.While | ast.Assert, spot: Spot) -> str:
    match owner:
        case ast.Assert():
            return f"{GUARD}\n    {ast.unparse(owner)}"
        case ast.If() if (
            all(isinstance(s, ast.Raise | ast.Expr | ast.Assert) for s in owner.body)
            and not owner.orelse
        ):
            return f"{GUARD}\n" + "\n".join(
                f"    {line}" for line in ast.unparse(owner).splitlines()
            )
        case ast.If():
            return _of_if(owner, spot)
        case ast.IfExp():
            return replaced(
                spot.statement,
                owner,
                f"torch.where({_condition(owner.test)}, {text_of(owner.body)},"
                f" {text_of(owner.orelse)})",
            )
        case ast.While(body=[ast.Assign(targets=[ast.Name(id=name)], value=value)]):
            where = f"{name} = torch.where({_condition(owner.test)}, {text_of(value)}, {name})"
            return f"for _ {_ROUNDS}\n    {where}"
    return f"for _ {_ROUNDS}\n    x = torch.where({_condition(owner.test)}, after_a_round, x)"


def _kept(test: ast.expr, spot: Spot) -> str:
    """Return assignments that keep a condition's names tensors.

    One line for each name that was converted from a tensor to a Python number.
    """
    function = next((p for p in spot.parents if isinstance(p, ast.FunctionDef)), None)
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    lines = []
    for statement in ast.walk(function) if function is not None else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
                name in names
                and statement.lineno < spot.statement.lineno
                and re.search(r"\.item\(\)|\b(int|float)\(", text_of(value))
            ):
                lines.append(f"{name} = {_condition(value)}  # a 0-dim tensor\n")
    return "".join(lines)


def _of_if(owner: ast.If, spot: Spot) -> str:
    condition = _condition(owner.test)
    match owner.body, owner.orelse:
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)], []:
            return f"{name} = torch.where({condition}, {text_of(value)}, {name})"
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)], [
            ast.Assign(targets=[ast.Name(id=other)], value=second)
        ] if name == other:
            return f"{name} = torch.where({condition}, {text_of(value)}, {text_of(second)})"
        case [ast.Return(value=ast.expr() as value)], [ast.Return(value=ast.expr() as second)]:
            return f"return torch.where({condition}, {text_of(value)}, {text_of(second)})"
        case [ast.Return(value=ast.expr() as value)], []:
            following = _next(owner, spot.parents)
            if isinstance(following, ast.Return) and following.value is not None:
                return (
                    f"return torch.where({condition}, {text_of(value)}, {text_of(following.value)})"
                )
    inside = [n for s in owner.body + owner.orelse for n in ast.walk(s)]
    if any(isinstance(n, ast.Return | ast.Break | ast.Continue) for n in inside):
        return _WHERE  # it leaves more than the branch: a function or a loop
    written = sorted(
        {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    )
    names = ", ".join(written) or "x"
    body = [line for s in owner.body for line in ast.unparse(s).splitlines()]
    lines = [
        f"def when_true({names}):",
        *(
            f"    {line}"
            for line in (body if len(body) <= 3 else ["...  # the lines under the if"])
        ),
    ]
    lines.append(f"    return {names}")
    otherwise = (
        f"lambda {names}: {_tuple([f'{n}.clone()' for n in written or ['x']])}"
        if not owner.orelse
        else "when_false"
    )
    return "\n".join(
        [*lines, f"{names} = torch.cond({condition}, when_true, {otherwise}, ({names},))"]
    )


def _tuple(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _next(statement: ast.stmt, parents: tuple[ast.AST, ...]) -> ast.stmt | None:
    for parent in parents:
        body = getattr(parent, "body", None)
        if isinstance(body, list) and statement in body:
            place = body.index(statement)
            return body[place + 1] if place + 1 < len(body) else None
    return None


class _Tensors(ast.NodeTransformer):
    """Rewrites `and`, `or`, `not`, bool(), float(), int() and .item() for tensors."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        parts = [self.visit(value) for value in node.values]
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        result: ast.expr = parts[0]
        for part in parts[1:]:
            result = ast.BinOp(result, operator, part)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand: ast.expr = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ast.Call(ast.Attribute(ast.Name("torch"), "logical_not"), [operand], [])
        return ast.UnaryOp(node.op, operand)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="bool" | "float" | "int"), args=[value]):
                return value
            case ast.Call(func=ast.Attribute(value=value, attr="item" | "tolist"), args=[]):
                return value
            case ast.Call(func=ast.Attribute(attr="equal"), args=[first, second]):
                return ast.Call(
                    ast.Attribute(ast.Compare(first, [ast.Eq()], [second]), "all"), [], []
                )
            case ast.Call(func=ast.Attribute(attr="allclose") as function, args=[_, _]):
                function.attr = "isclose"
                return ast.Call(ast.Attribute(node, "all"), [], [])
        return node


def _condition(test: ast.expr) -> str:
    return ast.unparse(_Tensors().visit(_copy(test)))


def text_of(node: ast.expr) -> str:
    """Return an expression as source code."""
    return ast.unparse(node)


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def replaced(statement: ast.stmt, old: ast.expr, new: str) -> str:
    """Return a simple statement with one of its expressions replaced.

    It is the new expression alone if the statement has a body.
    """
    if hasattr(statement, "body"):
        return new
    text, inner = ast.unparse(statement), ast.unparse(old)
    if inner in text:
        return text.replace(
            f"({inner})" if f"({inner})" in text and not isinstance(old, ast.Call) else inner, new
        )
    return new


# Numbers and sizes


def number(spot: Spot | None) -> str:
    """Return code that keeps a number taken out of a tensor as a tensor."""
    match spot.statement if spot is not None else None:
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[count])) as loop if (
            spot is not None
        ):
            index, name, after = "i", "x", "after_a_round"
            match loop:
                case ast.For(
                    target=ast.Name(id=index),
                    body=[ast.Assign(targets=[ast.Name(id=name)], value=value)],
                ):
                    after = text_of(value)
            return (
                f"{_kept(count, spot)}for {index} {_ROUNDS}\n"
                f"    {name} = torch.where({index} < {_condition(count)}, {after}, {name})"
            )
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
            spot is not None and not isinstance(value, ast.Compare)
        ):
            code = f"{name} = {_condition(value)}  # a 0-dim tensor"
            match spot.node:
                case ast.Call(func=ast.Name(id="int")):
                    code += (
                        "\n"
                        f"counted = torch.arange(most, device={name}.device) < {name}  # instead"
                        f" of a size: a mask over `most` entries"
                    )
            return code
    return (
        "chosen = values[tensor_index]                       # an index may stay a tensor\n"
        "mask = torch.arange(most, device=n.device) < n      # instead of a size n: a mask over"
        " `most` entries\n"
        "total = (values * mask).sum() / n.clamp(min=1)"
    )


# Sizes of inputs


def size(spot: Spot | None, text: str, name: str) -> str:
    """Return code in which a size follows the input.

    It may also declare the sizes that the model accepts now.

    name: an input with that size, used if torch does not name the input and the dim.
    """
    fixed = re.search(r"^\s*\w+ = (\d+)\s*$", text, re.MULTILINE)
    declared = re.search(r"^\s*\w+ = (Dim\([^*\n]*\d\))\s*$", text, re.MULTILINE)
    at_fault = re.search(r"L\['batch'\]\['([^']+)'\]\.size\(\)\[(\d+)\]", text)
    name, dim = at_fault.groups() if at_fault is not None else (name, "0")
    lines = []
    if spot is not None and ".tolist()" in text_of(spot.node):
        return number(None)
    match spot.node if spot is not None else None:
        # in code that is in no module
        case ast.Call(func=ast.Name(id="len"), args=[value]) as call if spot is not None:
            lines.append(replaced(spot.statement, call, f"{text_of(value)}.shape[0]"))
        case ast.Call(func=ast.Name(id="int"), args=[value]) as call if spot is not None:
            lines.append(replaced(spot.statement, call, text_of(value)))
        case ast.Call(func=ast.Name(id="float"), args=[value]) as call if spot is not None:
            lines.append(replaced(spot.statement, call, f"torch.sym_float({text_of(value)})"))
        case ast.ListComp(elt, [ast.comprehension(target, rows, [])]) | ast.GeneratorExp(
            elt, [ast.comprehension(target, rows, [])]
        ):
            lines.append(
                f"torch.vmap(lambda {text_of(target)}: {text_of(elt)})({text_of(rows)})  # or an"
                " operator over the dim, in place of the loop"
            )
    # over as many rows as the example has
    if spot is not None and isinstance(loop := spot.statement, ast.For) and loop.iter is spot.node:
        lines.append(
            f"{text_of(loop.iter)}.sum(0)  # an operator over the dim, or"
            f" torch.vmap(f)({text_of(loop.iter)}), in place of the loop"
        )
    if (
        spot is not None
        and fixed is not None
        and isinstance(spot.node, ast.Call)
        and not hasattr(spot.statement, "body")
    ):
        text_of_call = text_of(spot.node)
        tensor = text_of(spot.node.func.value) if isinstance(spot.node.func, ast.Attribute) else "x"
        if re.search(rf"\b{fixed[1]}\b", text_of_call) and tensor.isidentifier():
            lines.append(
                re.sub(
                    rf"\b{fixed[1]}\b",
                    f"{tensor}.shape[{dim}]",
                    ast.unparse(spot.statement),
                    count=1,
                )
            )
    if declared is not None:
        lines.append(
            f'Job(..., dynamic={{"{name}": {{{dim}: {declared[1]}}}}})  # these sizes and no others'
        )
    else:
        lines.append(
            f'Job(..., dynamic={{"{name}": {{{dim}: Dim.STATIC}}}})  # the size of Job.batch and no'
            " other"
        )
    if at_fault is not None:
        lines.append(
            "freeze(job, path, apply_suggested_fixes=True)  # --apply-suggested-fixes: declares"
            " what torch suggests"
        )
    return "\n".join(lines)
