"""Detect a hang of a run, and the ranks that cause it, from the heartbeats of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainload.launching.run.activity import Doing, Phase


@dataclass(frozen=True, slots=True)
class Hang:
    """A run that makes no progress.

    Attributes:
        ranks: ranks that block it; all ranks if they wait in the same place.
        why: description for people.
        seconds: time since the first of `ranks` last made progress; if they never reported, since
            the first of the others did.
        doing: last known activity of every rank.
    """

    ranks: tuple[int, ...]
    why: str
    seconds: float
    doing: Mapping[int, Doing]


@dataclass(slots=True)
class _RankProgress:
    doing: Doing
    heard: float
    moved: float


class Monitor:
    """Hang detector for the ranks of one attempt.

    Args:
        world: number of ranks.
        hang_timeout: seconds without progress, or without a heartbeat, after which a rank hangs.
        start_timeout: the same before the first step, while a rank reads weights and data and
            compiles, and while it compares compiled graphs or completes a profile.
        saving_timeout: the same while a rank waits for storage.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        world: int,
        hang_timeout: float,
        start_timeout: float,
        saving_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._hang_timeout = hang_timeout
        self._others = {
            Phase.STARTING: start_timeout,
            Phase.COMPARING: start_timeout,  # it may compile parts of a graph
            Phase.PROFILING: start_timeout,  # it derives the graphs once more
            Phase.SAVING: saving_timeout,
            Phase.ENDING: saving_timeout,
        }
        self._clock = clock
        self._start_timeout = start_timeout
        self._began: float | None = None
        self._ranks: dict[int, _RankProgress] = {}

    def begin(self) -> None:
        """Expect the first heartbeats from now on, unless this has been called before."""
        if self._began is None:
            self._began = self._clock()

    def hear(self, rank: int, doing: Doing, age: float = 0.0) -> None:
        """Record a rank's activity, which it reported `age` seconds ago."""
        heard = self._clock() - age
        before = self._ranks.get(rank)
        if before is None or _position(before.doing) != _position(doing):
            self._ranks[rank] = _RankProgress(doing, heard, heard)
        else:
            before.doing, before.heard = doing, heard

    @property
    def doing(self) -> dict[int, Doing]:
        """The last reported activity of every rank that has reported."""
        return {rank: progress.doing for rank, progress in sorted(self._ranks.items())}

    def hang(self) -> Hang | None:
        """Return the hang, if there is one.

        If called rarely, it finds hangs late, but reports no false ones.
        """
        now = self._clock()
        silent = [
            rank
            for rank, progress in self._ranks.items()
            if now - progress.heard > self._limit(progress)
        ]
        if silent:
            return self._make_hang(
                silent, "no heartbeat from {}: stopped, or its node is unreachable", now
            )
        # Ranks wait for each other at every step: as long as one of them makes progress, nothing
        # hangs.
        if not self._ranks:
            return self._silence(now)
        if any(now - progress.moved <= self._limit(progress) for progress in self._ranks.values()):
            return None
        unheard = sorted(set(range(self._world)) - set(self._ranks))
        if unheard:  # the ranks that have reported wait for them
            return self._make_hang(unheard, "{} never reported, and the others wait", now)
        positions = {rank: _position(progress.doing) for rank, progress in self._ranks.items()}
        behind = [
            rank for rank, position in positions.items() if position == min(positions.values())
        ]
        if len(behind) == self._world and self._world > 1:
            return self._make_hang(
                behind,
                "{} wait in the same place: for the network between them, or for one of them inside"
                " an operator",
                now,
            )
        return self._make_hang(
            behind,
            "{} made no progress" + ("" if self._world == 1 else ", and the others wait"),
            now,
        )

    def _silence(self, now: float) -> Hang | None:
        """Return a hang of all ranks if none has reported in time."""
        if self._began is None:
            return None
        waited = now - self._began
        if waited <= max(self._start_timeout, self._hang_timeout):
            return None
        ranks = tuple(range(self._world))
        return Hang(ranks, f"{in_words(ranks)} never reported", waited, {})

    def _limit(self, progress: _RankProgress) -> float:
        return max(self._hang_timeout, self._others.get(progress.doing.phase, 0.0))

    def _make_hang(self, ranks: list[int], why: str, now: float) -> Hang:
        moved = [progress.moved for rank, progress in self._ranks.items() if rank in ranks] or [
            progress.moved for progress in self._ranks.values()
        ]
        return Hang(
            tuple(sorted(ranks)), why.format(in_words(sorted(ranks))), now - min(moved), self.doing
        )


def in_words(ranks: Sequence[int]) -> str:
    """Return ranks as a phrase: "rank 3", "ranks 0, 1"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _position(doing: Doing) -> tuple[int, int, int]:
    """Return a rank's progress, which is comparable between ranks that run the same program."""
    return (-1 if doing.step is None else doing.step, doing.marks, doing.issued)
