"""Finds the lines of the user's code that put conditions on input sizes.

torch logs a record to `torch.fx.experimental.symbolic_shapes` (TORCH_LOGS=dynamic shows them) at
the moment when a size is compared. The stack at that moment contains the user's line, and the sizes
of the fake inputs are the record's symbols. `torch.export.draft_export` does not help: its report
is a private attribute with lines but no columns, it writes logs below /tmp, and it continues with
numbers that the example does not have (`for i in range(x.max().item())` started 7e18 rounds).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from trainload.capture.source.source_place import place_here

_LOGGER = "torch.fx.experimental.symbolic_shapes"
_GUARD = re.compile(
    r"(?:eval|runtime_assert)(?: \(forcing_spec\))? (?!\[guard suppressed\])(?P<expression>.+?)"
    r" \[guard added\]"
)
_REPLACEMENT = re.compile(r"set_replacement (?P<symbol>\w+) = (?P<value>\S+) \(")


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition of the code: `expression` over torch's symbols, and the user's line.

    `place` is "file:line"; `place` and `line` are empty if no line of the user caused it.
    """

    expression: str
    place: str
    line: str


class Guards:
    """Guards recorded during one trace.

    Attributes:
        symbols: (input, dim) -> the symbol of its size in the trace. Sizes that were constants from
            the start are missing.
        conditions: the guards, in order.
        replacements: symbol -> (the number or expression that it was found to equal, the guard that
            decided it).
    """

    def __init__(self) -> None:
        self.symbols: dict[tuple[str, int], str] = {}
        self.conditions: list[Guard] = []
        self.replacements: dict[str, tuple[str, Guard]] = {}

    @contextmanager
    def noted(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Record the guards on the sizes of `batch` inside the block.

        torch.export traces a function of the batch there.
        """
        sizes = {
            (name, dim): str(size)
            for name, leaf in batch.items()
            for dim, size in enumerate(leaf.shape)
        }
        self.symbols.update({place: size for place, size in sizes.items() if not size.isdigit()})
        with listening(_Listener(self)):
            yield

    def alike(self, symbol: str) -> frozenset[str]:
        """Return the symbols that were found to be equal to it, and the symbol itself."""
        pairs = [(name, value) for name, (value, _) in self.replacements.items()]
        equal = {symbol}
        while (
            more := {
                other for pair in pairs if equal & {*pair} for other in pair if other.isidentifier()
            }
            - equal
        ):
            equal |= more
        return frozenset(equal)

    def about(self, symbol: str) -> list[Guard]:
        """Return the guards about a symbol or its equals.

        First those that made it a constant, then those that made it equal another, then the rest.

        A guard that made another symbol a constant is left out, since it does not concern this one.
        """
        alike = self.alike(symbol)
        first = [
            (not value.isdigit(), guard)
            for name, (value, guard) in self.replacements.items()
            if name in alike
        ]
        others = {
            guard
            for name, (value, guard) in self.replacements.items()
            if name not in alike and value.isdigit()
        }
        rest = [
            guard
            for guard in self.conditions
            if guard not in others and alike & set(re.findall(r"\w+", guard.expression))
        ]
        return list(
            dict.fromkeys([*(guard for _, guard in sorted(first, key=lambda pair: pair[0])), *rest])
        )


class _Listener(logging.Handler):
    def __init__(self, guards: Guards) -> None:
        super().__init__(logging.INFO)
        self._guards = guards

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if guard := _GUARD.match(text):
            self._guards.conditions.append(Guard(guard["expression"], *_users_line()))
        elif (replacement := _REPLACEMENT.match(text)) and self._guards.conditions:
            self._guards.replacements.setdefault(
                replacement["symbol"], (replacement["value"], self._guards.conditions[-1])
            )


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    """Replace the logger's handlers by this one inside the block, whatever its settings were."""
    logger = logging.getLogger(_LOGGER)
    before = (logger.handlers, logger.level, logger.disabled, logger.propagate)
    logger.handlers, logger.disabled, logger.propagate = [handler], False, False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, level, logger.disabled, logger.propagate = before
        logger.setLevel(level)


def _users_line() -> tuple[str, str]:
    """Return place ("file:line") and source of the innermost frame of the user's code."""
    place = place_here()
    return ("", "") if place is None else (str(place), place.source)
