"""Current activity of a rank: updated by its training thread, read by the thread that reports
it.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainload.sharding.analysis.collectives import Collective

_FRAMES = 3


class Phase(StrEnum):
    """Phases of a rank's work."""

    STARTING = "starting"
    DATA = "waiting for data"
    STEP = "in a step"
    COMPARING = "comparing a compiled graph with the interpreted one"
    SEARCHING = "searching for the first value that is not finite"
    PROFILING = "profiling"
    AGREEING = "agreeing whether to continue"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Doing:
    """Snapshot of a rank's activity.

    Attributes:
        phase: current phase.
        step: current step, from 0 (messages count from 1); None before the first.
        marks: number of phases and graph calls so far, as a measure of progress.
        graph: last graph that was called; "" before the first.
        issued: number of collectives that this call has begun.
        collective: description of the last collective; "" if there is none.
        place: Python stack of the training thread, innermost frame first.
        memory: memory usage in bytes.
        worked_steps: number of steps so far in whose time `worked` is.
        worked: seconds of these steps in which it did not wait for other ranks.
    """

    phase: Phase = Phase.STARTING
    step: int | None = None
    marks: int = 0
    graph: str = ""
    issued: int = 0
    collective: str = ""
    place: str = ""
    memory: int = 0
    worked_steps: int = 0
    worked: float = 0.0

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step + 1}"
        collective = self.collective or (
            f"no collective of {self.graph} yet" if self.graph else "no collective yet"
        )
        return f"{self.phase}{at}, last collective: {collective}" + (
            f", at {self.place}" if self.place else ""
        )


class Activity:
    """Activity of this rank. The training thread creates and updates it; other threads call `now`.

    Args:
        memory: function that returns the memory usage of this process in bytes.
    """

    def __init__(self, memory: Callable[[], int] = lambda: 0) -> None:
        self._memory = memory
        self._thread = threading.get_ident()
        self._phase, self._marks = Phase.STARTING, 0
        self._step: int | None = None
        self._worked = (0, 0.0)
        self._graph, self._before = "", dict[str, int]()
        self._last: tuple[str, int] | None = None
        self._called: dict[str, list[Collective]] = {}
        self._numbers: dict[str, dict[str, list[int]]] = {}
        self._count: Callable[[], dict[str, int]] = dict

    def know(
        self, collectives: Mapping[str, Sequence[Collective]], count: Callable[[], dict[str, int]]
    ) -> None:
        """Set the information by which collectives are described from now on.

        Args:
            collectives: collectives of each graph, in the order of their calls.
            count: function that returns process group -> number of collectives that this rank has
                begun in it.
        """
        self._called = {
            graph: [each for each in listed if each.is_called]
            for graph, listed in collectives.items()
        }
        for graph, called in self._called.items():
            by_group = self._numbers[graph] = defaultdict(list)
            for number, each in enumerate(called, 1):
                by_group[each.group].append(number)
        self._count = count

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Enter a phase; with `step` None the step does not change."""
        self._phase = phase
        if step is not None:
            self._step = step
        self._marks += 1

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Set the phase within the context, and restore the previous one afterwards."""
        before = self._phase
        self.at(phase)
        yield
        self.at(before)

    def worked(self, seconds: float) -> None:
        """Record the time of a step in which this rank did not wait for others."""
        steps, before = self._worked
        self._worked = (steps + 1, before + seconds)

    def calling(self, graph: str) -> None:
        """Record that a graph is about to be called."""
        self._last = self._last_begun() or self._last
        self._before = self._count()
        self._graph = graph
        self._marks += 1

    def now(self) -> Doing:
        """Return a snapshot.

        Since the rank keeps running, its fields may be from slightly different moments.
        """
        begun = self._last_begun()
        issued = 0 if begun is None else begun[1]
        last = self._describe(begun or self._last)
        return Doing(
            self._phase,
            self._step,
            self._marks,
            self._graph,
            issued,
            last,
            self._stack(),
            self._memory(),
            *self._worked,
        )

    def _last_begun(self) -> tuple[str, int] | None:
        """Return the current graph and the number (1-based) of the last collective that its call
        has begun; None if there is none.
        """
        count = self._count()
        last = 0
        for group, numbers in self._numbers.get(self._graph, {}).items():
            begun = count.get(group, 0) - self._before.get(group, 0)
            if begun > 0:
                last = max(last, numbers[min(begun, len(numbers)) - 1])
        return (self._graph, last) if last else None

    def _describe(self, begun: tuple[str, int] | None) -> str:
        if begun is None:
            return ""
        graph, number = begun
        called = self._called[graph]
        return f"{called[number - 1]} ({number} of {len(called)} of {graph})"

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        frames: list[str] = []
        while frame is not None and len(frames) < _FRAMES:
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return ", called from ".join(frames)
