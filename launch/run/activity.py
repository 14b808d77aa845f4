"""What a rank is doing: marked by its training thread as it goes, read by whoever reports it."""

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
    """The parts of a rank's life."""

    STARTING = "starting"
    DATA = "waiting for data"
    STEP = "in a step"
    COMPARING = "comparing a compiled graph with the interpreted one"
    AGREEING = "asking whether to go on"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank does at one moment.

    Attributes:
        phase: see `Phase`.
        step: the one that it is at, from 0 (people are told the count, from 1); None before the first.
        marks: how often it has gone on to something else.
        graph: the last graph that it called, "" before the first.
        issued: collectives that it has begun in that call.
        collective: the last of these, in words; "" where there is none.
        place: where its Python is, innermost frame first.
        memory: bytes that it holds.
    """

    phase: Phase = Phase.STARTING
    step: int | None = None
    marks: int = 0
    graph: str = ""
    issued: int = 0
    collective: str = ""
    place: str = ""
    memory: int = 0

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step + 1}"
        said = self.collective or (f"no collective of {self.graph} yet" if self.graph else "no collective yet")
        return f"{self.phase}{at}, last collective: {said}" + (f", at {self.place}" if self.place else "")


class Activity:
    """What this rank is doing. Made by the thread that trains; `now` is for other threads.

    Args:
        memory: how many bytes this process holds.
    """

    def __init__(self, memory: Callable[[], int] = lambda: 0) -> None:
        self._memory = memory
        self._thread = threading.get_ident()
        self._phase, self._marks = Phase.STARTING, 0
        self._step: int | None = None
        self._graph, self._before = "", dict[str, int]()
        self._last: tuple[str, int] | None = None
        self._called: dict[str, list[Collective]] = {}
        self._numbers: dict[str, dict[str, list[int]]] = {}
        self._count: Callable[[], dict[str, int]] = dict

    def know(self, collectives: Mapping[str, Sequence[Collective]], count: Callable[[], dict[str, int]]) -> None:
        """From now on collectives can be named.

        Args:
            collectives: what each graph calls, in order.
            count: process group -> collectives that this rank has begun in it.
        """
        self._called = {graph: [each for each in listed if each.is_called] for graph, listed in collectives.items()}
        for graph, called in self._called.items():
            by_group = self._numbers[graph] = defaultdict(list)
            for number, each in enumerate(called, 1):
                by_group[each.group].append(number)
        self._count = count

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Another part of the rank's life has begun. `step` None: that of before."""
        self._phase = phase
        if step is not None:
            self._step = step
        self._marks += 1

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Within it the rank is in another phase; afterwards in that of before."""
        before = self._phase
        self.at(phase)
        yield
        self.at(before)

    def calling(self, graph: str) -> None:
        """A graph is about to be called."""
        self._last = self._begun() or self._last
        self._before = self._count()
        self._graph = graph
        self._marks += 1

    def now(self) -> Doing:
        """What it does. It goes on meanwhile: the parts may be a moment apart."""
        begun = self._begun()
        issued = 0 if begun is None else begun[1]
        last = self._in_words(begun or self._last)
        return Doing(self._phase, self._step, self._marks, self._graph, issued, last, self._place(), self._memory())

    def _begun(self) -> tuple[str, int] | None:
        """The graph, and the number among its collectives of the last one that its call has begun; None where it has begun none."""
        count = self._count()
        last = 0
        for group, numbers in self._numbers.get(self._graph, {}).items():
            begun = count.get(group, 0) - self._before.get(group, 0)
            if begun > 0:
                last = max(last, numbers[min(begun, len(numbers)) - 1])
        return (self._graph, last) if last else None

    def _in_words(self, begun: tuple[str, int] | None) -> str:
        if begun is None:
            return ""
        graph, number = begun
        called = self._called[graph]
        return f"{called[number - 1]} ({number} of {len(called)} of {graph})"

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread)
        found: list[str] = []
        while frame is not None and len(found) < _FRAMES:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return ", called from ".join(found)
