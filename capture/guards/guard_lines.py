"""Which line of the user's code asked for what about the inputs' sizes, as torch decides it while it traces.

torch writes a record to the logger of `torch.fx.experimental.symbolic_shapes` (TORCH_LOGS=dynamic shows them) at the moment in which a
size is compared. The stack at that moment holds the user's line, and the sizes of the fake inputs are the record's symbols.
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
_GUARD = re.compile(r"(?:eval|runtime_assert)(?: \(forcing_spec\))? (?!\[guard suppressed\])(?P<expression>.+?) \[guard added\]")
_REPLACEMENT = re.compile(r"set_replacement (?P<symbol>\w+) = (?P<value>\S+) \(")


@dataclass(frozen=True, slots=True)
class Guard:
    """What the code needs to be so: `expression` over torch's symbols, `place` "file:line" of the user's code with its `line`.

    `place` and `line` are empty where no line of the user's asked for it.
    """

    expression: str
    place: str
    line: str


class Guards:
    """What was seen in one trace.

    Attributes:
        symbols: (input, dim) -> the symbol that its size was traced with. Sizes that were constants from the start are not there.
        found: the guards, in the order in which they came.
        made: symbol -> (what it was found to be: a number or an expression, the guard that made it so).
    """

    def __init__(self) -> None:
        self.symbols: dict[tuple[str, int], str] = {}
        self.found: list[Guard] = []
        self.made: dict[str, tuple[str, Guard]] = {}

    @contextmanager
    def noted(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, while torch.export traces a function of `batch`, what is asked of its sizes is noted."""
        sizes = {(name, dim): str(size) for name, leaf in batch.items() for dim, size in enumerate(leaf.shape)}
        self.symbols.update({place: size for place, size in sizes.items() if not size.isdigit()})
        with listening(_Listener(self)):
            yield

    def alike(self, symbol: str) -> frozenset[str]:
        """The symbols that were found to be equal to it, and itself."""
        pairs = [(name, value) for name, (value, _) in self.made.items()]
        known = {symbol}
        while more := {other for pair in pairs if known & {*pair} for other in pair if other.isidentifier()} - known:
            known |= more
        return frozenset(known)

    def about(self, symbol: str) -> list[Guard]:
        """The guards about a symbol or one alike: first what made it a constant, then what made it another's equal, then the rest.

        What made another symbol a constant is not among them: it says nothing of this one.
        """
        alike = self.alike(symbol)
        first = [(not value.isdigit(), guard) for name, (value, guard) in self.made.items() if name in alike]
        others = {guard for name, (value, guard) in self.made.items() if name not in alike and value.isdigit()}
        rest = [guard for guard in self.found if guard not in others and alike & set(re.findall(r"\w+", guard.expression))]
        return list(dict.fromkeys([*(guard for _, guard in sorted(first, key=lambda pair: pair[0])), *rest]))


class _Listener(logging.Handler):
    def __init__(self, guards: Guards) -> None:
        super().__init__(logging.INFO)
        self._guards = guards

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if guard := _GUARD.match(text):
            self._guards.found.append(Guard(guard["expression"], *_users_line()))
        elif (made := _REPLACEMENT.match(text)) and self._guards.found:
            self._guards.made.setdefault(made["symbol"], (made["value"], self._guards.found[-1]))


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    """Gives the logger this handler alone, whatever it was set to."""
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
    """Place ("file:line") and source of the innermost frame of the user's code in the present stack."""
    place = place_here()
    return ("", "") if place is None else (str(place), place.source)
