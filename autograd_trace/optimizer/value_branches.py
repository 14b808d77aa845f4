"""Lets an optimizer branch in Python on values: every way through its branches is traced, and the values choose among the results.

`if state["step"] > 5:` asks a tensor for a bool, which a graph cannot give. An update has no effect but its results, so it can be run once
for each answer; `torch.where` then takes the results of the way that the values would have gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOST_WAYS = 32
Results = tuple[Tensor, ...]
Decide = Callable[[Tensor], bool]


class TooManyWays(Exception):
    """The branches of an update have more than `MOST_WAYS` ways through them."""


class Ways:
    """Runs a function of tensors on every way through its branches.

    Attributes:
        count: of the ways that the last call took.
    """

    def __init__(self) -> None:
        self.count = 0

    def results(self, run: Callable[[Decide], Results]) -> Results:
        """The results of the way that the values choose: for each, the shape and dtype that all ways agree on.

        Args:
            run: given a function that answers what a 0-dim tensor is as a bool. It has no effect but its results.

        Raises:
            TooManyWays: more than `MOST_WAYS`.
            ValueError: the ways differ in the number, a shape or a dtype of their results.
        """
        self.count = 0
        return self._from(run, ())

    def _from(self, run: Callable[[Decide], Results], taken: tuple[bool, ...]) -> Results:
        """The results where the first branches go as `taken`, and the values choose at the others."""
        self.count += 1
        if self.count > MOST_WAYS:
            raise TooManyWays(f"its Python branches have more than {MOST_WAYS} ways through them")
        met: list[Tensor] = []

        def decide(value: Tensor) -> bool:
            met.append(value)
            return taken[len(met) - 1] if len(met) <= len(taken) else True

        found = run(decide)
        for place in range(len(met) - 1, len(taken) - 1, -1):
            otherwise = self._from(run, (*taken, *(True for _ in range(place - len(taken))), False))
            found = _chosen(met[place], found, otherwise)
        return found


def _chosen(condition: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> Results:
    if [_kind(t) for t in first] != [_kind(t) for t in second]:
        raise ValueError("the ways through its Python branches leave state of different shapes or dtypes")
    return tuple(a if a is b else torch.where(condition.reshape(()) != 0, a, b) for a, b in zip(first, second, strict=True))


def _kind(result: Tensor) -> object:
    """What must agree between ways. Numbers need not: one way may leave a number of Python's, another the tensor that it reckoned with."""
    return (result.shape, result.dtype) if result.ndim else result.dtype.is_floating_point
