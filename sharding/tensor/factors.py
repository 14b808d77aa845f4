"""Factors of the dims of a graph's tensors, and which of them are the same.

A dim is a sequence of factors, outermost first, whose sizes multiply to its own: for a fused
projection's output, 3 * heads * 64, after the graph has split and viewed it so. Operators tie
factors together: a matmul ties the columns of one operand to the rows of the other, an addition
ties dim to dim. Tied factors form one class, and sharding a class shards every tensor that has it,
at any position within a dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy

Size = Any
"""A number, or an expression of symbols."""
Dim = tuple["Factor", ...]
Dims = tuple[Dim, ...]


class Factor:
    """A part of a dim.

    Compare the results of `Factors.leaves`, by identity: other factors may have been tied or
    divided since.
    """

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.parent: Factor | None = None
        self.parts: Dim | None = None

    def __repr__(self) -> str:
        return f"<{self.size} at {id(self) % 65536:04x}>"


class Factors:
    """A registry that makes factors, ties them, and records which cannot be separated from others
    that they overlap.
    """

    def __init__(self) -> None:
        self._broken: set[Factor] = set()

    def dim(self, size: Size) -> Dim:
        """Return a new, untied dim; () for a dim of one element."""
        return () if size == 1 else (Factor(size),)

    def dims(self, shape: Iterable[Size]) -> Dims:
        """Return new, untied dims."""
        return tuple(self.dim(size) for size in shape)

    def leaves(self, dim: Iterable[Factor]) -> Dim:
        """Return the factors that a dim currently consists of."""
        leaves: list[Factor] = []
        stack = list(dim)[::-1]
        while stack:
            factor = _root(stack.pop())
            if factor.parts is None:
                leaves.append(factor)
            else:
                stack += factor.parts[::-1]
        return tuple(leaves)

    def is_broken(self, factor: Factor) -> bool:
        """Return True if dims overlap here in a way that no common factors express."""
        return any(leaf in self._broken for leaf in self.leaves((factor,)))

    def tie(self, left: Sequence[Factor], right: Sequence[Factor]) -> None:
        """Make two dims of the same size the same."""
        ours, theirs = list(self.leaves(left))[::-1], list(self.leaves(right))[::-1]
        while ours and theirs:
            one, other = ours.pop(), theirs.pop()
            if one is other:
                continue
            if one.size == other.size:
                self._join(one, other)
            elif (rest := divided(other.size, one.size)) is not None:
                theirs.append(self._divide(other, one, rest))
            elif (rest := divided(one.size, other.size)) is not None:
                ours.append(self._divide(one, other, rest))
            else:
                self._broken.update([one, other, *ours, *theirs])
                return
        self._broken.update([*ours, *theirs])

    def regroup(self, dims: Iterable[Dim], shape: Sequence[Size]) -> Dims | None:
        """Return the dims of the same elements, in the same order, viewed as a tensor of `shape`;
        None if the dims of the two overlap.
        """
        rest = [factor for dim in dims for factor in self.leaves(dim)][::-1]
        regrouped: list[Dim] = []
        for size in shape:
            factors: list[Factor] = []
            remaining: Size = size
            while remaining != 1:
                if not rest:
                    return None
                factor = rest.pop()
                if (quotient := divided(remaining, factor.size)) is not None:
                    factors.append(factor)
                    remaining = quotient
                elif (quotient := divided(factor.size, remaining)) is not None:
                    first = Factor(remaining)
                    rest.append(self._divide(factor, first, quotient))
                    factors.append(first)
                    remaining = 1
                else:
                    return None
            regrouped.append(tuple(factors))
        return tuple(regrouped) if not rest else None

    def _divide(self, factor: Factor, first: Factor, rest: Size) -> Factor:
        second = Factor(rest)
        factor.parts = (first, second)
        if factor in self._broken:
            self._broken |= {first, second}
        return second

    def _join(self, one: Factor, other: Factor) -> None:
        other.parent = one
        if other in self._broken:
            self._broken.add(one)


def divided(whole: Size, part: Size) -> Size | None:
    """Return whole / part; None if that is not a whole number."""
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if whole % part == 0 else None
    quotient, below = sympy.fraction(sympy.cancel(sympy.sympify(whole) / part))
    if below != 1:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def _root(factor: Factor) -> Factor:
    top = factor
    while top.parent is not None:
        top = top.parent
    while factor.parent is not None:
        factor.parent, factor = top, factor.parent
    return top
