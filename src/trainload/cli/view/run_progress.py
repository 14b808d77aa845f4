"""Progress of a run: on a terminal a panel at the bottom with events above it, otherwise plain
lines.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from trainload.cli.view.tables import event_line, ranks_table, step_line
from trainload.core.formatting import duration, size

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event
    from trainload.launching.run.run_state import RunState, Summary

PLAIN_INTERVAL = 10.0
"""Minimum time between two plain lines about steps, in seconds."""
MOST_RANKS = 8
"""Maximum number of ranks in a panel, those furthest behind first."""
_FINAL_EVENTS = frozenset({"end", "failed", "stopped"})
_REFRESHES = 4
_LOOK_SECONDS = 1.0
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 48


class RunView:
    """Display of a run's events. Used as a context manager, and called with each event.

    On a terminal it shows a panel with the progress and the state of every rank, and a line for
    each event that is not a step. Otherwise it prints lines: one about steps every
    `PLAIN_INTERVAL` seconds, and one for the last step. If the terminal is closed, or the pipe has
    no reader any more, the display stops and the run continues.

    Args:
        console: where to print.
        run_dir: the run's folder, if any, where the driver writes what each rank does.
        clock: returns the time in seconds.
        past: earlier events, which are not shown again.
    """

    def __init__(
        self,
        console: Console,
        run_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        past: Iterable[Event] = (),
    ) -> None:
        self._console, self._clock = console, clock
        self._last_line = -math.inf
        self._unsaid: Mapping[str, Any] | None = None
        self._live: Live | None = None
        self._gone = False
        self._panel = Panel(run_dir)
        for event in past:
            self._panel.take(event)
        if console.is_interactive:
            self._live = Live(
                console=console, get_renderable=self._panel.shown, refresh_per_second=_REFRESHES
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            with self._to_terminal():
                self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._unsaid is not None:
            self._print_line(step_line(self._unsaid))
        if self._live is not None:
            self._panel.over = True
            with self._to_terminal():
                self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if self._live is not None:
            self._panel.take(event)
        if event.kind == "step":
            self._step(event.data)
        elif event.kind not in _FINAL_EVENTS:
            self._print_line(event_line(event))

    def _step(self, data: Mapping[str, Any]) -> None:
        if self._live is not None:
            return
        if self._clock() - self._last_line < PLAIN_INTERVAL:
            self._unsaid = data
            return
        self._unsaid = None
        self._last_line = self._clock()
        self._print_line(step_line(data))

    def _print_line(self, line: str) -> None:
        if not self._gone:
            with self._to_terminal():
                # options of `print` would apply to the panel below as well, and it joins bare texts
                # into one that is wrapped
                self._console.print(Group(Text(line, no_wrap=True, overflow="ignore")), crop=False)

    @contextmanager
    def _to_terminal(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit):  # rich raises this for a pipe without a reader
            self._gone = True


class Panel:
    """Progress of a run in a few lines. One thread adds events, another one draws.

    Args:
        run_dir: the run's folder, if any.

    Attributes:
        over: True if no more events follow; then ranks are not shown.
    """

    def __init__(self, run_dir: Path | None) -> None:
        from trainload.launching.run.run_state import Summary

        self.over = False
        self._run_dir = run_dir
        self._began = time.monotonic()
        self._summary: Summary = Summary()
        self._losses: deque[float] = deque(maxlen=_CURVE * 8)
        self._state: RunState | None = None
        self._looked = -math.inf

    def take(self, event: Event) -> None:
        """Add an event."""
        self._summary.take(event)
        if event.kind == "step":
            self._losses.append(float(event.data["loss"]))

    def shown(self) -> RenderableType:
        """Return the present lines."""
        summary = self._summary
        if not summary.starts:
            return Group(f"starting, {duration(time.monotonic() - self._began)}")
        lines = _lines(summary, self._losses)
        parts: list[RenderableType] = [self._bar(), *map(Text.from_markup, lines)]
        if not self.over and summary.message:
            parts.append(Text(summary.message))
        state = None if self.over else self._ranks()
        if state is not None and state.ranks:
            parts.append(ranks_table(state, MOST_RANKS))
        return Group(*parts)

    def _bar(self) -> Progress:
        summary = self._summary
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[time]}"),
            expand=True,
        )
        time_left = (
            "" if summary.seconds_left is None else f"  {duration(summary.seconds_left)} left"
        )
        passed = f"{duration(time.monotonic() - self._began)}{time_left}"
        progress.add_task(summary.phase, total=summary.steps, completed=summary.step, time=passed)
        return progress

    def _ranks(self) -> RunState | None:
        """Return the last state of the ranks that the driver wrote."""
        from trainload.launching.run.run_state import read_state

        if self._run_dir is not None and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._state = read_state(self._run_dir) or self._state
        return self._state


def _lines(summary: Summary, losses: Sequence[float]) -> Iterator[str]:
    """Return the numbers of a run."""
    loss_curve = f"   {curve(losses, _CURVE)}" if len(losses) > 1 else ""
    yield from filter(
        None,
        (_join(_training(summary)) + loss_curve, _join(_speed(summary)), _join(_safety(summary))),
    )
    if summary.last_failure:
        yield f"[dim]last failure[/dim] {escape(summary.last_failure)}"


def _training(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.loss is not None:
        yield "loss", f"{summary.loss:.4f}"
    if summary.gradient_norm is not None:
        yield "gradient norm", f"{summary.gradient_norm:.4f}"
    if summary.evaluation is not None:
        yield "evaluation", f"{summary.evaluation:.4f} at step {summary.evaluated_at}"


def _speed(summary: Summary) -> Iterator[tuple[str, str]]:
    rate = summary.tokens_per_second or summary.rows_per_second
    if rate is not None:
        yield "tokens/s" if summary.tokens_per_second else "rows/s", f"{rate:,.0f}"
    if summary.mfu is not None:
        yield "MFU", f"{summary.mfu:.1%}"
    if summary.memory is not None:
        yield "memory", size(summary.memory)
    if summary.data_wait is not None:
        yield "waiting for data", f"{summary.data_wait:.1%}"


def _safety(summary: Summary) -> Iterator[tuple[str, str]]:
    age = (
        None
        if summary.checkpoint_time is None
        else duration(max(0.0, time.time() - summary.checkpoint_time))
    )
    yield "checkpoint", "none" if age is None else f"step {summary.checkpoint}, {age} ago"
    yield "ranks", f"{summary.world}, {summary.strategy}"
    yield "failures", str(summary.failures)
    yield "warnings", str(summary.warnings)


def _join(pairs: Iterator[tuple[str, str]]) -> str:
    return "   ".join(f"[dim]{name}[/dim] {escape(value)}" for name, value in pairs)


def curve(values: Sequence[float], width: int) -> str:
    """Return the finite values as bars, each the mean of its part of them: `[3.0, 2.0, 1.0]` ->
    "█▅▁".
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * at // count for at in range(count + 1)]
    means = [sum(finite[first:last]) / (last - first) for first, last in pairwise(edges)]
    least, span = min(means), max(means) - min(means)
    return "".join(
        _BARS[round((mean - least) / span * (len(_BARS) - 1)) if span else 0] for mean in means
    )
