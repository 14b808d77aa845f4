"""Find an expression of the user's source in its syntax tree."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass

from trainload.capture.source.source_place import place_at
from trainload.core.finding import Place


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
