"""Write replacements for code that leaves torch, or reads or changes state outside of the graph.

They are built from the user's own expressions.
"""

from __future__ import annotations

import ast
import re

import torch

from trainload.capture.source.control_flow_rewrite import GUARD, replaced, text_of
from trainload.capture.source.expression_spot import Spot

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
            return f"{GUARD}\n    {before}"
        if not hasattr(statement, "body"):
            torch_only = _Numpy()
            after = ast.unparse(torch_only.visit(ast.parse(before)))
            if after != before:
                return after + (
                    "  # a tensor; a module is copied in __init__" if torch_only.copies else ""
                )
    return f"{GUARD}\n    ...  # what needs values: prints, logs, plots"


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
                f"    {text_of(owner)}.copy_({text_of(value).replace('.data', '')})"
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
        owner, name = text_of(spot.node.value), spot.node.attr
        match spot.statement:
            case ast.AugAssign(op=operator, value=amount) if type(operator) in _IN_PLACE:
                change = f"{_IN_PLACE[type(operator)]}({text_of(amount)})"
            case ast.Assign(value=assigned):
                change = f"copy_({text_of(assigned)})"
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
            return f"{GUARD}\n    {text}"
        if isinstance(spot.node, ast.Call):
            inner = text_of(spot.node)
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
            out_of_place = ast.unparse(
                ast.Call(
                    ast.Attribute(ast.Name(name), method.rstrip("_")), call.args, call.keywords
                )
            )
            return (
                f"{name} = {out_of_place}"
                if isinstance(spot.statement, ast.Expr)
                else replaced(spot.statement, call, out_of_place)
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
