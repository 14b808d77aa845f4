"""A run as it goes on: a panel at the bottom of a terminal, with what happens above it; plain lines
elsewhere.
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

from trainload.cli.view.tables import event_line, ranks_table, step_line
from trainload.core.formatting import duration, size

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event
    from trainload.launching.run.run_state import RunState, Summary

PLAIN_INTERVAL = 10.0
"""Seconds between two plain lines about steps."""
MOST_RANKS = 8
"""Number of ranks in a panel, those furthest behind first."""
_SAID_AT_THE_END = frozenset({"end", "failed", "stopped"})
_REFRESHES = 4
_LOOK_SECONDS = 1.0
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 48


class RunView:
    """Shows a run's events as they come. Used as a context manager; call it with each event.

    On a terminal: a panel of where the run is, with the state of every rank, and a line for all
    that is not a step. Elsewhere: lines, for steps one every `PLAIN_INTERVAL` seconds and one for
    the last step. Where the terminal is closed, or nobody reads the lines any more, nothing is
    shown from then on, and the run goes on.

    Args:
        console: where.
        run_dir: the run's folder, where there is one: its driver says there what each rank does.
        clock: seconds.
        past: what has happened before, which is not told again.
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
        if console.is_terminal:
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
            self._say(step_line(self._unsaid))
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
        elif event.kind not in _SAID_AT_THE_END:
            self._say(event_line(event))

    def _step(self, data: Mapping[str, Any]) -> None:
        if self._live is not None:
            return
        if self._clock() - self._last_line < PLAIN_INTERVAL:
            self._unsaid = data
            return
        self._unsaid = None
        self._last_line = self._clock()
        self._say(step_line(data))

    def _say(self, line: str) -> None:
        if not self._gone:
            with self._to_terminal():
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _to_terminal(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit):  # rich's word for a pipe that nobody reads
            self._gone = True


class Panel:
    """Progress of a run in a few lines. Events come by one thread, and another one draws.

    Args:
        run_dir: the run's folder, where there is one.

    Attributes:
        over: nothing more will come; ranks are not shown any more.
    """

    def __init__(self, run_dir: Path | None) -> None:
        from trainload.launching.run.run_state import Summary

        self.over = False
        self._run_dir = run_dir
        self._began = time.monotonic()
        self._told: Summary = Summary()
        self._losses: deque[float] = deque(maxlen=_CURVE * 8)
        self._state: RunState | None = None
        self._looked = -math.inf

    def take(self, event: Event) -> None:
        """One event more."""
        self._told.take(event)
        if event.kind == "step":
            self._losses.append(float(event.data["loss"]))

    def shown(self) -> RenderableType:
        """It, as it is now."""
        told = self._told
        if not told.starts:
            return Group(f"starting, {duration(time.monotonic() - self._began)}")
        parts: list[RenderableType] = [self._bar(), *_lines(told, self._losses)]
        if not self.over and told.message:
            parts.append(escape(told.message))
        state = None if self.over else self._ranks()
        if state is not None and state.ranks:
            parts.append(ranks_table(state, MOST_RANKS))
        return Group(*parts)

    def _bar(self) -> Progress:
        told = self._told
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[time]}"),
            expand=True,
        )
        left = "" if told.seconds_left is None else f"  {duration(told.seconds_left)} left"
        passed = f"{duration(time.monotonic() - self._began)}{left}"
        progress.add_task(told.phase, total=told.steps, completed=told.step, time=passed)
        return progress

    def _ranks(self) -> RunState | None:
        """Return the last state of the ranks that the driver wrote."""
        from trainload.launching.run.run_state import read_state

        if self._run_dir is not None and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._state = read_state(self._run_dir) or self._state
        return self._state


def _lines(told: Summary, losses: Sequence[float]) -> Iterator[str]:
    """The numbers of a run."""
    drawn = f"   {curve(losses, _CURVE)}" if len(losses) > 1 else ""
    yield from filter(
        None, (_joined(_training(told)) + drawn, _joined(_speed(told)), _joined(_safety(told)))
    )
    if told.last_failure:
        yield f"[dim]last failure[/dim] {escape(told.last_failure)}"


def _training(told: Summary) -> Iterator[tuple[str, str]]:
    if told.loss is not None:
        yield "loss", f"{told.loss:.4f}"
    if told.gradient_norm is not None:
        yield "gradient norm", f"{told.gradient_norm:.4f}"
    if told.evaluation is not None:
        yield "evaluation", f"{told.evaluation:.4f} at step {told.evaluated_at}"


def _speed(told: Summary) -> Iterator[tuple[str, str]]:
    rate = told.tokens_per_second or told.rows_per_second
    if rate is not None:
        yield "tokens/s" if told.tokens_per_second else "rows/s", f"{rate:,.0f}"
    if told.mfu is not None:
        yield "MFU", f"{told.mfu:.1%}"
    if told.memory is not None:
        yield "memory", size(told.memory)
    if told.data_wait is not None:
        yield "waiting for data", f"{told.data_wait:.1%}"


def _safety(told: Summary) -> Iterator[tuple[str, str]]:
    age = (
        None
        if told.checkpoint_time is None
        else duration(max(0.0, time.time() - told.checkpoint_time))
    )
    yield "checkpoint", "none" if age is None else f"step {told.checkpoint}, {age} ago"
    yield "ranks", f"{told.world}, {told.strategy}"
    yield "failures", str(told.failures)
    yield "warnings", str(told.warnings)


def _joined(pairs: Iterator[tuple[str, str]]) -> str:
    return "   ".join(f"[dim]{name}[/dim] {escape(value)}" for name, value in pairs)


def curve(values: Sequence[float], width: int) -> str:
    """The finite ones of some values as bars, each the mean of its share of them: `[3.0, 2.0, 1.0]`
    -> "█▅▁".
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
