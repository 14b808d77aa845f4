"""What a rank is doing: marked by its training thread as it goes, read by whoever reports it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainload.sharding.collectives import Collective

_FRAMES = 3


class Phase(StrEnum):
    """The parts of a rank's life."""

    STARTING = "starting"
    DATA = "waiting for data"
    STEP = "in a step"
    AGREEING = "asking whether to go on"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank does at one moment.

    Attributes:
        phase: see `Phase`.
        step: the one that it is at, None before the first.
        marks: how often it has gone on to something else.
        graph: the last graph that it called, "" before the first.
        issued: collectives that it has begun in that call.
        collective: the last of these, in words; "" where there is none.
        place: where its Python is, innermost frame first.
    """

    phase: Phase = Phase.STARTING
    step: int | None = None
    marks: int = 0
    graph: str = ""
    issued: int = 0
    collective: str = ""
    place: str = ""

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        said = self.collective or (f"no collective of {self.graph} yet" if self.graph else "no collective yet")
        return f"{self.phase}{at}, last collective: {said}" + (f", at {self.place}" if self.place else "")


class Activity:
    """What this rank is doing. Made by the thread that trains; `now` is for other threads."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._phase, self._marks = Phase.STARTING, 0
        self._step: int | None = None
        self._graph, self._before, self._last = "", dict[str, int](), ""
        self._collectives: Mapping[str, Sequence[Collective]] = {}
        self._count: Callable[[], dict[str, int]] = dict

    def know(self, collectives: Mapping[str, Sequence[Collective]], count: Callable[[], dict[str, int]]) -> None:
        """From now on collectives can be named.

        Args:
            collectives: what each graph calls, in order.
            count: process group -> collectives that this rank has begun in it.
        """
        self._collectives, self._count = collectives, count

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Another part of the rank's life has begun. `step` None: that of before."""
        self._phase = phase
        if step is not None:
            self._step = step
        self._marks += 1

    def calling(self, graph: str) -> None:
        """A graph is about to be called."""
        _, self._last = self._since_call()
        self._before = self._count()
        self._graph = graph
        self._marks += 1

    def now(self) -> Doing:
        """What it does. It goes on meanwhile: the parts may be a moment apart."""
        issued, collective = self._since_call()
        return Doing(self._phase, self._step, self._marks, self._graph, issued, collective, self._place())

    def _since_call(self) -> tuple[int, str]:
        """How many collectives the graph's call has begun, and the last one in words: of an earlier call, where it has begun none."""
        began = {group: count - self._before.get(group, 0) for group, count in self._count().items()}
        called = self._collectives.get(self._graph, ())
        seen: dict[str, int] = {}
        last = -1
        for number, each in enumerate(called):
            seen[each.group] = seen.get(each.group, 0) + each.is_called
            if each.is_called and seen[each.group] <= began.get(each.group, 0):
                last = number
        total = sum(each.is_called for each in called)
        if last < 0:
            return 0, self._last
        issued = sum(each.is_called for each in called[: last + 1])
        return issued, f"{called[last]} ({issued} of {total} of {self._graph})"

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread)
        found: list[str] = []
        while frame is not None and len(found) < _FRAMES:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return ", called from ".join(found)
