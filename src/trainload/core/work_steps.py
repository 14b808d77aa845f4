"""Steps of long work: named where the work is done, and shown by the command line.

    with steps_shown(display):
        ...
        begin_step("comparing the graphs")
        read = ByteStep("reading the weights", total)
        read.add(4096)

Without `steps_shown`, as for calls from Python, nothing happens. The function that shows steps
belongs to a context (contextvars), so a thread that the work starts shows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from trainload.core.formatting import size

_shown: ContextVar[Callable[[str], None] | None] = ContextVar("shown", default=None)


@contextmanager
def steps_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with the text of each step that begins within the block."""
    token = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(token)


def begin_step(text: str) -> None:
    """Name what is done from now on, such as "tracing graph train"."""
    show = _shown.get()
    if show is not None:
        show(text)


class ByteStep:
    """A step that reads or writes a known number of bytes.

    Args:
        text: what is done, such as "writing weights".
        total: number of bytes.
    """

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total, self._done = text, total, 0
        self.add(0)

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        begin_step(f"{self._text}, {size(self._done)} of {size(self._total)}")
