"""Writes replacements for code that cannot be captured, built from the user's own expressions."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainload.capture.source.source_place import place_at
from trainload.core.finding import Place

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
_GUARD = "if not torch.compiler.is_exporting():  # in eager mode only"


@dataclass(frozen=True, slots=True)
class Spot:
    """An expression in its syntax tree: its node, and the enclosing nodes, innermost first."""

    node: ast.expr
    parents: tuple[ast.AST, ...]

    @property
    def statement(self) -> ast.stmt:
        """The statement that contains it."""
        return next(p for p in (self.node, *self.parents) if isinstance(p, ast.stmt))

    @property
    def test_of(self) -> ast.If | ast.IfExp | ast.While | ast.Assert | None:
        """The node that branches on it, if it is a condition or a part of one."""
        inner: ast.AST = self.node
        for parent in self.parents:
            if (
                isinstance(parent, ast.If | ast.IfExp | ast.While | ast.Assert)
                and parent.test is inner
            ):
                return parent
            if not isinstance(parent, ast.BoolOp | ast.UnaryOp | ast.Compare | ast.Call):
                return None
            inner = parent
        return None


def spot_of(place: Place | None) -> Spot | None:
    """Find a place in its file's syntax tree; None if the file cannot be read or has changed."""
    if place is None or place.span == (0, 0, 0, 0):
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except SyntaxError:
        return None
    for node, parents in _walk(tree, ()):
        if (
            isinstance(node, ast.expr | ast.Assert | ast.If | ast.While | ast.For)
            and _span(node) == place.span
        ):
            while True:
                match node:
                    case (
                        ast.Assert(test=inner)
                        | ast.If(test=inner)
                        | ast.IfExp(test=inner)
                        | ast.While(test=inner)
                    ):
                        node, parents = inner, (node, *parents)
                    case ast.UnaryOp(op=ast.Not(), operand=inner) | ast.For(iter=inner):
                        node, parents = inner, (node, *parents)
                    case ast.expr():
                        return Spot(node, parents)
    return None


def sharpened(place: Place | None) -> Place | None:
    """Narrow a place that bytecode reports as a whole branch to its condition.

    Python 3.11 does so if the condition is a call.
    """
    spot = spot_of(place)
    return (
        place_at(place.file, place.function, _span(spot.node))
        if place is not None and spot is not None
        else place
    )


def _walk(
    node: ast.AST, parents: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (node, *parents))


def _span(node: ast.expr | ast.stmt) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


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
            return f"{_GUARD}\n    {ast.unparse(owner)}"
        case ast.If() if (
            all(isinstance(s, ast.Raise | ast.Expr | ast.Assert) for s in owner.body)
            and not owner.orelse
        ):
            return f"{_GUARD}\n" + "\n".join(
                f"    {line}" for line in ast.unparse(owner).splitlines()
            )
        case ast.If():
            return _of_if(owner, spot)
        case ast.IfExp():
            return _replaced(
                spot.statement,
                owner,
                f"torch.where({_condition(owner.test)}, {_text(owner.body)},"
                f" {_text(owner.orelse)})",
            )
        case ast.While(body=[ast.Assign(targets=[ast.Name(id=name)], value=value)]):
            where = f"{name} = torch.where({_condition(owner.test)}, {_text(value)}, {name})"
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
                and re.search(r"\.item\(\)|\b(int|float)\(", _text(value))
            ):
                lines.append(f"{name} = {_condition(value)}  # a 0-dim tensor\n")
    return "".join(lines)


def _of_if(owner: ast.If, spot: Spot) -> str:
    condition = _condition(owner.test)
    match owner.body, owner.orelse:
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)], []:
            return f"{name} = torch.where({condition}, {_text(value)}, {name})"
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)], [
            ast.Assign(targets=[ast.Name(id=other)], value=second)
        ] if name == other:
            return f"{name} = torch.where({condition}, {_text(value)}, {_text(second)})"
        case [ast.Return(value=ast.expr() as value)], [ast.Return(value=ast.expr() as second)]:
            return f"return torch.where({condition}, {_text(value)}, {_text(second)})"
        case [ast.Return(value=ast.expr() as value)], []:
            following = _next(owner, spot.parents)
            if isinstance(following, ast.Return) and following.value is not None:
                return f"return torch.where({condition}, {_text(value)}, {_text(following.value)})"
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


def _text(node: ast.expr) -> str:
    return ast.unparse(node)


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _replaced(statement: ast.stmt, old: ast.expr, new: str) -> str:
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
                    after = _text(value)
            return (
                f"{_kept(count, spot)}for {index} {_ROUNDS}\n"
                f"    {name} = torch.where({index} < {_condition(count)}, {after}, {name})"
            )
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
            spot is not None and not isinstance(value, ast.Compare)
        ):
            kept = f"{name} = {_condition(value)}  # a 0-dim tensor"
            match spot.node:
                case ast.Call(func=ast.Name(id="int")):
                    kept += (
                        "\n"
                        f"counted = torch.arange(most, device={name}.device) < {name}  # instead"
                        f" of a size: a mask over `most` entries"
                    )
            return kept
    return (
        "chosen = values[tensor_index]                       # an index may stay a tensor\n"
        "mask = torch.arange(most, device=n.device) < n      # instead of a size n: a mask over"
        " `most` entries\n"
        "total = (values * mask).sum() / n.clamp(min=1)"
    )


# Values outside of torch


class _Numpy(ast.NodeTransformer):
    """Rewrites numpy functions, and conversions to numpy, with torch."""

    copies = False
    """True if `copy` or `deepcopy` was replaced by `clone`, which only tensors have."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=value, attr="numpy" | "cpu" | "detach" | "tolist" | "item"
                ),
                args=[],
            ):
                return value
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="from_numpy"), args=[value]
            ):
                return value
            case ast.Call(func=ast.Name(id="float"), args=[value]):
                return value
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=name)) if (
                hasattr(torch, name)
            ):
                return ast.Call(ast.Attribute(ast.Name("torch"), name), node.args, node.keywords)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="copy"), attr="deepcopy" | "copy"),
                args=[value],
            ):
                self.copies = True
                return ast.Call(ast.Attribute(value, "clone"), [], [])
        return node


def values(spot: Spot | None) -> str:
    """Return code that computes the same with torch, or prints and logs in eager mode only."""
    if spot is not None:
        statement = spot.statement
        before = ast.unparse(statement)
        if re.search(r"\btorch\.load\(|\bnp\.load\(|\bopen\(", before):
            return (
                'self.register_buffer("loaded", torch.load(path))  # in __init__\nself.loaded  # in'
                " forward"
            )
        if isinstance(statement, ast.Expr):
            return f"{_GUARD}\n    {before}"
        if not hasattr(statement, "body"):
            torch_only = _Numpy()
            after = ast.unparse(torch_only.visit(ast.parse(before)))
            if after != before:
                return after + (
                    "  # a tensor; a module is copied in __init__" if torch_only.copies else ""
                )
    return f"{_GUARD}\n    ...  # what needs values: prints, logs, plots"


# `.data`, attributes, global state


def data(spot: Spot | None) -> str:
    """Return code with an in-place write for a write through `.data`, detach() for a read."""
    if spot is None:
        return "with torch.no_grad():\n    self.buffer.copy_(value)"
    statement = spot.statement
    text = ast.unparse(statement)
    match statement:
        case ast.Assign(targets=[ast.Attribute(value=owner, attr="data")], value=value):
            return (
                "with torch.no_grad():\n"
                f"    {_text(owner)}.copy_({_text(value).replace('.data', '')})"
            )
        case ast.Expr() | ast.AugAssign():
            return f"with torch.no_grad():\n    {text.replace('.data', '')}"
    return text.replace(".data", ".detach()") if not hasattr(statement, "body") else "x.detach()"


_IN_PLACE: dict[type[ast.operator], str] = {
    ast.Add: "add_",
    ast.Sub: "sub_",
    ast.Mult: "mul_",
    ast.Div: "div_",
}


def attribute(spot: Spot | None) -> str:
    """Return code that keeps a Python number of a module in a buffer."""
    owner, name, change = "self", "count", "add_(1)"
    if spot is not None and isinstance(spot.node, ast.Attribute):
        owner, name = _text(spot.node.value), spot.node.attr
        match spot.statement:
            case ast.AugAssign(op=operator, value=amount) if type(operator) in _IN_PLACE:
                change = f"{_IN_PLACE[type(operator)]}({_text(amount)})"
            case ast.Assign(value=assigned):
                change = f"copy_({_text(assigned)})"
    return (
        f'self.register_buffer("{name}", torch.tensor(0))  # in __init__, with its first'
        f" value\n{owner}.{name}.{change}  # in forward"
    )


_DRAWS = {
    "random.random()": "torch.rand(())",
    "np.random.rand()": "torch.rand(())",
    "numpy.random.rand()": "torch.rand(())",
    "np.random.random()": "torch.rand(())",
    "np.random.randn()": "torch.randn(())",
}


def outside(spot: Spot | None) -> str:
    """Return code with a draw of torch, or an input, for a value from outside of the model."""
    if spot is not None and not hasattr(spot.statement, "body"):
        text = ast.unparse(spot.statement)
        after = text
        for old, new in _DRAWS.items():
            after = after.replace(f"float({old})", new).replace(old, new)
        if after != text:
            return after
        if "seed(" in text:
            return "Job(..., seed=0)  # the run draws from it; leave this line out"
        if isinstance(spot.statement, ast.Expr):
            return f"{_GUARD}\n    {text}"
        if isinstance(spot.node, ast.Call):
            inner = _text(spot.node)
            return (
                f"self.setting = {inner}  # in __init__, once\n"
                f"{text.replace(inner, 'self.setting')}"
            )
    return 'batch["seen"]  # pass it in the batch, or keep it in a buffer of the model'


def input_write(spot: Spot | None) -> str:
    """Return code with an out-of-place operator for a write to an input."""
    match spot.node if spot is not None else None:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) as call if (
            spot is not None and method.endswith("_")
        ):
            kept = ast.unparse(
                ast.Call(
                    ast.Attribute(ast.Name(name), method.rstrip("_")), call.args, call.keywords
                )
            )
            return (
                f"{name} = {kept}"
                if isinstance(spot.statement, ast.Expr)
                else _replaced(spot.statement, call, kept)
            )
        case ast.Subscript(value=ast.Name(id=name)) if spot is not None:
            return f"{name} = {name}.clone()\n{ast.unparse(spot.statement)}"
    return "x = x.clone()  # before it is written to"


def parameter_write(spot: Spot | None) -> str:
    """Return code with a parametrization for a constraint on a parameter."""
    owner, name = "self", "weight"
    if spot is not None:
        for node in ast.walk(spot.node):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner, name = node.value.id, node.attr
    return (
        "class Constrained(nn.Module):\n"
        "    def forward(self, weight):\n"
        "        return weight.clamp(-1, 1)  # what the write does\n"
        f'torch.nn.utils.parametrize.register_parametrization({owner}, "{name}", Constrained())  #'
        " in __init__"
    )


# Operators


def operator_name(text: str) -> str:
    """Return the name "library::operator" in torch's message; a placeholder if it names none."""
    found = re.search(
        r"\b([a-z_]\w*)(?:::|\.)(\w+?)(?:\.(?:default|Tensor|Scalar|out|\w+_\w+))?(?:[:>\s)]|$)",
        text,
        re.IGNORECASE,
    )
    quoted = re.search(r"(\w+)::(\w+)", text)
    chosen = quoted or found
    return f"{chosen[1]}::{chosen[2]}" if chosen else "my_library::my_operator"


def fake_kernel(text: str) -> str:
    """Return a fake kernel for the operator that torch named.

    For one of torch's operators it is a custom operator around it.
    """
    name = operator_name(text)
    if name.startswith("aten::"):
        return custom_operator(name.partition("::")[2].lstrip("_"))
    return (
        f'@torch.library.register_fake("{name}")\ndef _(x):\n    return torch.empty_like(x)  # with'
        " the shape and dtype of the result"
    )


def custom_operator(name: str = "part") -> str:
    """Return a custom operator of the user's own, into which a capture does not look."""
    return (
        f'@torch.library.custom_op("my_library::{name}", mutates_args=())\n'
        f"def {name}(x: torch.Tensor) -> torch.Tensor:\n"
        "    return ...  # the current code\n"
        f"@{name}.register_fake\n"
        "def _(x):\n"
        "    return torch.empty_like(x)  # with the shape and dtype of the result\n"
        f"{name}.register_autograd(lambda ctx, gradient: ...)  # its derivative"
    )


def derivative(text: str) -> str:
    """Return a derivative for the operator that torch named."""
    return (
        "def setup(ctx, inputs, output):\n"
        "    ctx.save_for_backward(*inputs)\n"
        "def backward(ctx, gradient):\n"
        "    (x,) = ctx.saved_tensors\n"
        "    return gradient * ...  # the derivative at x\n"
        f'torch.library.register_autograd("{operator_name(text)}", backward, setup_context=setup)'
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
    if spot is not None and ".tolist()" in _text(spot.node):
        return number(None)
    match spot.node if spot is not None else None:
        # in code that is in no module
        case ast.Call(func=ast.Name(id="len"), args=[value]) as call if spot is not None:
            lines.append(_replaced(spot.statement, call, f"{_text(value)}.shape[0]"))
        case ast.Call(func=ast.Name(id="int"), args=[value]) as call if spot is not None:
            lines.append(_replaced(spot.statement, call, _text(value)))
        case ast.Call(func=ast.Name(id="float"), args=[value]) as call if spot is not None:
            lines.append(_replaced(spot.statement, call, f"torch.sym_float({_text(value)})"))
        case ast.ListComp(elt, [ast.comprehension(target, rows, [])]) | ast.GeneratorExp(
            elt, [ast.comprehension(target, rows, [])]
        ):
            lines.append(
                f"torch.vmap(lambda {_text(target)}: {_text(elt)})({_text(rows)})  # or an operator"
                " over the dim, in place of the loop"
            )
    # over as many rows as the example has
    if spot is not None and isinstance(loop := spot.statement, ast.For) and loop.iter is spot.node:
        lines.append(
            f"{_text(loop.iter)}.sum(0)  # an operator over the dim, or"
            f" torch.vmap(f)({_text(loop.iter)}), in place of the loop"
        )
    if (
        spot is not None
        and fixed is not None
        and isinstance(spot.node, ast.Call)
        and not hasattr(spot.statement, "body")
    ):
        text_of_call = _text(spot.node)
        tensor = _text(spot.node.func.value) if isinstance(spot.node.func, ast.Attribute) else "x"
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
