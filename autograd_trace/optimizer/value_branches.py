"""Allow an optimizer to branch in Python on values: every path through its branches is traced, and
the values choose among the results.

`if state["step"] > 5:` converts a tensor to a bool, which a graph cannot do. An update has no
effect other than its results, so it can be run once for each answer; `torch.where` then selects the
results of the path that the values would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOST_WAYS = 32
Results = tuple[Tensor, ...]
Decide = Callable[[Tensor], bool]


class TooManyWays(Exception):
    """The branches of an update have more than `MOST_WAYS` paths through them."""


class Ways:
    """Runner of a function of tensors on every path through its branches.

    Attributes:
        count: number of paths that the last call ran.
    """

    def __init__(self) -> None:
        self.count = 0

    def results(self, run: Callable[[Decide], Results]) -> Results:
        """Return the results of the path that the values choose. All paths agree on the shape and
        dtype of each result.

        Args:
            run: called with a function that decides the bool value of a 0-dim tensor. It has no
                effect other than its results.

        Raises:
            TooManyWays: there are more than `MOST_WAYS` paths.
            ValueError: the paths differ in the number, a shape or a dtype of their results.
        """
        self.count = 0
        return self._explore(run, ())

    def _explore(self, run: Callable[[Decide], Results], decisions: tuple[bool, ...]) -> Results:
        """Return the results if the first branches go as in `decisions` and the values choose at
        the others.
        """
        self.count += 1
        if self.count > MOST_WAYS:
            raise TooManyWays(f"its Python branches have more than {MOST_WAYS} paths through them")
        conditions: list[Tensor] = []

        def decide(value: Tensor) -> bool:
            conditions.append(value)
            return decisions[len(conditions) - 1] if len(conditions) <= len(decisions) else True

        results = run(decide)
        for place in range(len(conditions) - 1, len(decisions) - 1, -1):
            otherwise = self._explore(
                run, (*decisions, *(True for _ in range(place - len(decisions))), False)
            )
            results = _select(conditions[place], results, otherwise)
        return results


def _select(condition: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> Results:
    if [_kind(t) for t in first] != [_kind(t) for t in second]:
        raise ValueError(
            "the paths through its Python branches produce state of different shapes or dtypes"
        )
    return tuple(
        a if a is b else torch.where(condition.reshape(()) != 0, a, b)
        for a, b in zip(first, second, strict=True)
    )


def _kind(result: Tensor) -> object:
    """Return the properties in which paths must agree.

    Numbers may differ in dtype: one path may leave a Python number, another the tensor that it
    computed with.
    """
    return (result.shape, result.dtype) if result.ndim else result.dtype.is_floating_point
