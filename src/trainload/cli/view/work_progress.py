"""Progress of work whose length is not known: what is done, and for how long it has been."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trainload.core.formatting import duration

PLAIN_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


class WorkProgress:
    """Display of work, used as a context manager.

    On a terminal it is a line that disappears with the end of the work; otherwise a line every
    `PLAIN_SECONDS`, so that short work prints nothing.

    Args:
        console: where to print.
        title: what is being done, such as "verifying".
        plain_seconds: time between two lines where there is no terminal.
    """

    def __init__(self, console: Console, title: str, plain_seconds: float = PLAIN_SECONDS) -> None:
        self._console, self._title, self._plain_seconds = console, title, plain_seconds
        self._began = time.monotonic()
        self._over = threading.Event()
        self._bar: Progress | None = None
        if console.is_interactive:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        else:
            threading.Thread(target=self._print_lines, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def update(self, title: str) -> None:
        """Change what is being done."""
        self._title = title
        if self._bar is not None:
            self._bar.update(self._task, description=title)

    def _print_lines(self) -> None:
        while not self._over.wait(self._plain_seconds):
            passed = duration(time.monotonic() - self._began)
            self._console.print(
                f"{self._title}: {passed}", markup=False, highlight=False, soft_wrap=True
            )
