"""The record of how tensors got their first values: calls of operators, in order.

A tensor is recorded by its storage and its place in it, so it does not matter through which Python
object it was written: `weight.data`, a view, or the parameter made from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

LARGEST_CONSTANT = 2**20
"""Bytes of a constant."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a tape: the number of its storage, and its place in it, in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator.

    Attributes:
        operator: the operator, or `truncated_normal`.
        args: positional arguments, with a TensorRef in place of each tensor.
        kwargs: keyword arguments likewise.
        results: the tensors that it returned.
        created: storages that it created.
        written: storages that it changed, other than created ones.
        read: storages of its tensor arguments.
        random: True if it draws random numbers.
        state: state of the generator before a draw that was executed: uint8 (5056,).
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[TensorRef, ...]
    created: frozenset[int]
    written: frozenset[int]
    read: frozenset[int]
    random: bool = False
    state: Tensor | None = None


@dataclass(slots=True)
class Tape:
    """Calls in order, and tensors that came from elsewhere.

    Attributes:
        calls: the calls.
        constants: storage -> its values when it was read first, of shape (elements,), for storages
            whose creation was not recorded.
        outside: storage -> its size in bytes, for those that are too large for a constant.
        random_read: the number of calls before a random value was read first, on which those that
            follow may depend, and the user's expression that read it; None if there is none.
        read_draws: numbers of the draws on which values that were read depend. Code may have drawn
            again, until a value was as it should be.
    """

    calls: list[Call] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)
    random_read: tuple[int, str] | None = None
    read_draws: set[int] = field(default_factory=set)
    _touching: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def draws_for(self, storage: int) -> set[int]:
        """Return the numbers of the draws on which a storage's values depend."""
        return {number for number in self.calls_for(storage) if self.calls[number].random}

    def append(self, call: Call) -> None:
        """Add a call."""
        for storage in {ref.storage for ref in call.results} | call.created | call.written:
            self._touching[storage].append(len(self.calls))
        self.calls.append(call)

    def calls_for(self, storage: int) -> list[int]:
        """Return the numbers of the calls on which a storage's values depend, in order."""
        needed: set[int] = set()
        limits: dict[int, int] = {}
        pending = [(storage, len(self.calls))]
        while pending:
            current, limit = pending.pop()
            if limits.get(current, -1) >= limit:
                continue
            limits[current] = limit
            for number in self._touching.get(current, ()):
                if number >= limit:
                    break
                if number in needed:
                    continue
                needed.add(number)
                pending += [(read, number) for read in self.calls[number].read if read != current]
        return sorted(needed)


def instances(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a class in nested arguments or results."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from instances(item, kind)
    elif isinstance(value, Mapping):
        yield from instances(list(value.values()), kind)


def truncated_normal(tensor: Tensor, mean: float, std: float, low: float, high: float) -> Tensor:
    """Stand for `torch.nn.init.trunc_normal_` in calls: it rejects draws in a loop."""
    raise AssertionError("only its name is used")
