"""Marks regions, tangents and variables in the graph that is being traced."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainload.capture.watching import marks

Change = Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]
"""Computes new gradients from the arriving ones; None where there is no gradient."""


class Recorder:
    """Marks regions, tangents and variables of one trace, with unique numbers."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.quiet = False
        """True while the recorder itself changes the grad mode, which is not marked."""

    def number(self) -> int:
        """Return a new region number."""
        return next(self._numbers)

    def region(self, kind: str, text: str = "") -> int:
        """Begin a region and return its number."""
        number = self.number()
        marks.BEGIN(kind, text, number)
        return number

    @contextlib.contextmanager
    def quietly(self, enabled: bool) -> Iterator[None]:
        """Set the grad mode inside the block without marking it."""
        before, self.quiet = self.quiet, True
        try:
            with torch.set_grad_enabled(enabled):
                self.quiet = before
                yield
                self.quiet = True
        finally:
            self.quiet = before

    def tangent(self, x: Tensor, number: int) -> Tensor:
        """Return a placeholder for the gradient that arrives at x."""
        with self.quietly(False):
            result: Tensor = marks.TANGENT(x, number)
        return result

    def variable(self, x: Tensor, number: int) -> Tensor:
        """Return x as a variable of a func_grad region, even if x itself requires no gradient."""
        result: Tensor = marks.VARIABLE(x, number)
        if not result.requires_grad:
            before, self.quiet = self.quiet, True
            result.requires_grad_()
            self.quiet = before
        return result

    def passed(self, values: tuple[Any, ...], change: Change) -> tuple[Any, ...]:
        """Return the values, with their gradients passed through `change`."""
        places = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
        if not places or not torch.is_grad_enabled():
            return values
        number = self.number()
        tangents = tuple(
            self.tangent(v, number) if i in places else None for i, v in enumerate(values)
        )
        marks.BEGIN("backward", "", number)
        changed = change(tangents)
        marks.END(number)
        with_gradient = [i for i in places if changed[i] is not None]
        connected = iter(
            marks.CONNECT(
                [values[i] for i in with_gradient],
                [values[i] for i in with_gradient],
                [changed[i] for i in with_gradient],
                number,
            )
        )
        return tuple(next(connected) if i in with_gradient else v for i, v in enumerate(values))
