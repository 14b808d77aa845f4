"""Releases, history and lineage of a line stay consistent in any sequence of events and crashes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.retraining.pretended import LINE, Pretended, Writes, at, config_of, scheduler

from trainload.core.errors import ConflictError, StorageError
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store, blob_path
from trainload.retraining.ticks.line_lease import Held, LineLeases
from trainload.retraining.ticks.lineage import ancestry, read_line, rollback
from trainload.retraining.ticks.tick_records import name_of

KINDS = st.sampled_from(["better", "better", "worse", "empty", "bad", "diverging"])
OUTCOMES = {
    "better": "promoted",
    "worse": "rejected",
    "empty": "no data",
    "bad": "bad data",
    "diverging": "rejected",
}
DEATHS = st.one_of(st.none(), st.tuples(st.integers(1, 14), st.booleans()))


class Line(RuleBasedStateMachine):
    """The life of a line.

    `wanted`: tick -> expected outcome. `paused`: leases of paused processes.
    """

    package: Package

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.writes = Writes()
        self.stack.enter_context(
            self.writes.counted(self.stack.enter_context(pytest.MonkeyPatch.context()))
        )
        self.work = Pretended(self.package, self.folder)
        self.config = config_of(self.folder / "store")
        self.number = -1
        self.wanted: dict[str, str] = {}
        self.paused: list[Held] = []

    def teardown(self) -> None:
        self.writes.arm(None)
        for held in self.paused:
            held.leave()
        self.stack.close()
        shutil.rmtree(self.folder)

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    def run(self, number: int, death: Any) -> None:
        """Run a tick in a process that may die at a write; if so, run it again in another."""
        die_at, after = death or (None, False)
        self.writes.arm(die_at, after=after)
        with suppress(StorageError):
            scheduler(self.config, self.work).tick(at(number))
        if self.writes.dead:
            self.writes.arm(None)
            scheduler(self.config, self.work).tick(at(number))

    @initialize(kind=KINDS)
    def begin(self, kind: str) -> None:
        self.tick(kind, None, 0)

    @rule(kind=KINDS, death=DEATHS, gap=st.integers(0, 3))
    def tick(self, kind: str, death: Any, gap: int) -> None:
        self.number += 1 + gap
        name = name_of(at(self.number))
        self.wanted[name] = OUTCOMES[kind]
        found = {
            "worse": self.work.worse,
            "empty": self.work.empty,
            "bad": self.work.bad,
            "diverging": self.work.diverging,
        }
        found.get(kind, set()).add(name)
        self.run(self.number, death)

    @rule(death=DEATHS)
    def again(self, death: Any) -> None:
        before = self.seen()
        self.run(self.number, death)
        assert self.seen() == before

    @rule(death=DEATHS)
    def killed_and_left(self, death: Any) -> None:
        """Let a process die in a tick that is only continued when the next one is due."""
        die_at, after = death or (5, False)
        self.number += 1
        self.wanted[name_of(at(self.number))] = "promoted"
        self.writes.arm(die_at, after=after)
        with suppress(StorageError):
            scheduler(self.config, self.work).tick(at(self.number))
        self.writes.arm(None)
        begun = {
            story.name for story in read_line(self.store, LINE).ticks if story.pinned is not None
        }
        if name_of(at(self.number)) not in begun:  # it died before the tick was recorded
            del self.wanted[name_of(at(self.number))]
        self.tick("better", None, 0)

    @precondition(lambda self: len(self.seen()["current"]) > 1)
    @rule()
    def back(self) -> None:
        with suppress(StorageError):  # there is no earlier release
            rollback(self.store, LINE, reason="by hand")

    @rule()
    def pause(self) -> None:
        """Add a process that holds the lease and is paused for longer than its duration."""
        found = LineLeases(self.store, LINE, "paused").take_for("20260101T000000Z", 30.0)
        assert isinstance(found, Held)
        found.leave()
        self.paused.append(found)

    @precondition(lambda self: bool(self.paused))
    @rule()
    def wake(self) -> None:
        """Wake a paused process, which tries to promote after another process has had the lease."""
        held = self.paused.pop()
        self.tick("empty", None, 0)
        before = self.seen()["current"]
        with pytest.raises(ConflictError):
            self.store.promote(LINE, 1, after=held.after)
        assert self.seen()["current"] == before

    def seen(self) -> dict[str, Any]:
        self.writes.arm(None)
        story = read_line(self.store, LINE)
        return {
            "current": [entry.release for entry in story.changes],
            "releases": [(state.release.id, state.release.package) for state in story.states],
            "ended": {tick.name: tick.ended for tick in story.ticks if tick.ended is not None},
        }

    @invariant()
    def current_is_a_whole_release(self) -> None:
        self.writes.arm(None)
        pointer = self.store.current(LINE)
        assert pointer is not None
        release = self.store.release(LINE, int(pointer.release))
        assert release.package == pointer.package
        assert all(
            self.store.files.size(blob_path(entry.sha256)) == entry.size
            for entry in release.files.values()
        )

    @invariant()
    def every_tick_that_was_begun_has_ended_as_it_must(self) -> None:
        found = {name: ended.outcome for name, ended in self.seen()["ended"].items()}
        assert found == self.wanted

    @invariant()
    def what_was_promoted_had_passed_the_gate(self) -> None:
        self.writes.arm(None)
        for tick in read_line(self.store, LINE).ticks:
            if tick.ended is not None and tick.ended.outcome == "promoted":
                assert tick.decided is not None
                assert tick.decided.promote
                assert tick.evaluated is not None
                assert (tick.evaluated.challenger.loss or 9.0) < (
                    tick.evaluated.champion.loss or 0.0
                )

    @invariant()
    def each_tick_has_made_one_release_at_most(self) -> None:
        self.writes.arm(None)
        made = [state.release.facts.get("tick") for state in self.store.releases(LINE)]
        assert made[0] is None
        assert len(made[1:]) == len(set(made[1:]))

    @invariant()
    def every_release_goes_back_to_the_first_freeze(self) -> None:
        self.writes.arm(None)
        for state in self.store.releases(LINE):
            assert [
                step.state.release.name for step in ancestry(self.store, LINE, state.release.name)
            ][-1] == "1"


@pytest.mark.parametrize("examples", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_line_stays_whole(packaged: Package, examples: int) -> None:
    Line.package = packaged
    steps = min(12, 2 * examples + 1)  # with few examples, use short ones
    run_state_machine_as_test(
        Line,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
