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
        return self._from(run, ())

    def _from(self, run: Callable[[Decide], Results], taken: tuple[bool, ...]) -> Results:
        """Return the results if the first branches go as in `taken` and the values choose at the
        others.
        """
        self.count += 1
        if self.count > MOST_WAYS:
            raise TooManyWays(f"its Python branches have more than {MOST_WAYS} paths through them")
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
