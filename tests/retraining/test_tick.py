"""A tick runs once, whichever process runs it and however often; its data determine its outcome."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.retraining.pretended import (
    LINE,
    Pretended,
    Writes,
    at,
    config_of,
    made_snapshot,
    scheduler,
    summary,
)

from trainload.core.errors import (
    PackageError,
    RequestError,
    RunInterrupted,
    TrainingError,
    TrainloadError,
)
from trainload.core.storage import lease
from trainload.core.storage.lease import LeaseLostError, LeaseTakenError
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks import tick
from trainload.retraining.ticks.tick import TickContext
from trainload.retraining.ticks.tick_records import (
    Begun,
    Decided,
    Ended,
    Pinned,
    Taken,
    Ticks,
    Trained,
    name_of,
)


@pytest.fixture
def work(packaged: Package, tmp_path: Path) -> Pretended:
    return Pretended(packaged, tmp_path)


def name(number: int) -> str:
    return name_of(at(number))


def store_of(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_better_challenger_becomes_current(work: Pretended, tmp_path: Path) -> None:
    ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert (ended.outcome, ended.release) == ("promoted", "00000002")
    pointer = store_of(tmp_path).current(LINE)
    assert pointer is not None
    assert pointer.release == "00000002"
    assert pointer.reason.startswith(
        f"tick {name(0)}: eval.loss < champion.eval.loss: 0.9 < 1 is true"
    )


def test_a_worse_one_is_kept_as_rejected_with_the_reason(work: Pretended, tmp_path: Path) -> None:
    work.worse.add(name(0))
    ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert (ended.outcome, ended.reason) == (
        "rejected",
        "eval.loss < champion.eval.loss: 1.1 < 1 is false",
    )
    states = store_of(tmp_path).releases(LINE)
    assert [(state.release.name, state.status) for state in states] == [
        ("1", "current"),
        ("2", "rejected"),
    ]
    assert states[1].reason == ended.reason


def test_without_new_data_nothing_is_trained_and_nothing_changes(
    work: Pretended, tmp_path: Path
) -> None:
    work.empty.add(name(0))
    ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert (ended.outcome, ended.reason) == ("no data", "no new data: no file")
    assert (
        work.trained,
        len(store_of(tmp_path).releases(LINE)),
        len(store_of(tmp_path).history(LINE)),
    ) == ([], 1, 1)


def test_bad_data_is_not_trained_on(work: Pretended, tmp_path: Path) -> None:
    work.bad.add(name(0))
    ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert (ended.outcome, ended.reason, work.trained) == ("bad data", "a.parquet: a NaN", [])


def test_a_training_that_diverges_is_rejected_without_a_release(
    work: Pretended, tmp_path: Path
) -> None:
    work.diverging.add(name(0))
    ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert (ended.outcome, ended.release) == ("rejected", None)
    assert "the loss is nan" in ended.reason


def test_the_next_tick_starts_from_the_release_that_was_promoted(
    work: Pretended, tmp_path: Path
) -> None:
    runs = scheduler(config_of(tmp_path / "store"), work)
    runs.tick(at(0))
    runs.tick(at(1))
    pinned = Ticks(store_of(tmp_path), LINE).read(Pinned, name(1))
    assert pinned is not None
    assert pinned.parent == "00000002"


def test_a_tick_that_was_run_is_not_run_again(work: Pretended, tmp_path: Path) -> None:
    runs = scheduler(config_of(tmp_path / "store"), work)
    first = runs.tick(at(0))
    before = summary(store_of(tmp_path))
    assert runs.tick(at(0)) == first
    assert summary(store_of(tmp_path)) == before
    assert work.trained == [name(0)]


def test_a_tick_before_one_that_was_begun_is_refused(work: Pretended, tmp_path: Path) -> None:
    runs = scheduler(config_of(tmp_path / "store"), work)
    runs.tick(at(1))
    with pytest.raises(RequestError, match="a later tick has already started"):
        runs.tick(at(0))


def test_a_time_that_is_to_come_is_refused(work: Pretended, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="this time is in the future"):
        scheduler(config_of(tmp_path / "store"), work).tick(at(10_001))


def test_a_stage_that_fails_is_tried_again_from_there(work: Pretended, tmp_path: Path) -> None:
    runs = scheduler(config_of(tmp_path / "store"), work)
    work.fail = failing("evaluate", 1)
    with pytest.raises(TrainingError):
        runs.tick(at(0))
    assert runs.tick(at(0)).outcome == "promoted"
    assert work.trained == [name(0)]


def test_a_tick_that_fails_too_often_is_given_up_and_says_why(
    work: Pretended, tmp_path: Path
) -> None:
    runs = scheduler(config_of(tmp_path / "store", attempts=2), work)
    work.fail = failing("train", 9)
    for _ in range(2):
        with pytest.raises(TrainingError):
            runs.tick(at(0))
    ended = Ticks(store_of(tmp_path), LINE).read(Ended, name(0))
    assert ended is not None
    assert (ended.outcome, ended.reason) == (
        "failed",
        "it failed 2 times, the last time with: the train stage: broken",
    )


def test_after_one_that_was_given_up_the_next_one_runs(work: Pretended, tmp_path: Path) -> None:
    runs = scheduler(config_of(tmp_path / "store", attempts=1), work)
    work.fail = failing("train", 1)
    with pytest.raises(TrainingError):
        runs.tick(at(0))
    assert runs.tick(at(1)).outcome == "promoted"


def test_one_that_was_not_ended_goes_first(work: Pretended, tmp_path: Path) -> None:
    runs = scheduler(config_of(tmp_path / "store"), work)
    work.fail = failing("evaluate", 1)
    with pytest.raises(TrainingError):
        runs.tick(at(0))
    runs.tick(at(1))
    ended = Ticks(store_of(tmp_path), LINE).of_all(Ended)
    assert {tick: each.outcome for tick, each in ended.items()} == {
        name(0): "promoted",
        name(1): "promoted",
    }


def test_one_that_was_not_ended_is_still_due(work: Pretended, tmp_path: Path) -> None:
    runs = scheduler(config_of(tmp_path / "store"), work)
    assert runs.last_done() is None
    runs.tick(at(0))
    work.fail = failing("evaluate", 1)
    with pytest.raises(TrainingError):
        runs.tick(at(1))
    assert runs.last_done() == at(0)
    runs.tick(at(1))
    assert runs.last_done() == at(1)


def test_a_tick_goes_on_with_the_configuration_that_it_was_begun_with(
    work: Pretended, tmp_path: Path
) -> None:
    said: list[str] = []
    work.fail = failing("decide", 1)
    with pytest.raises(TrainingError):
        scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    changed = config_of(tmp_path / "store", gate={"require": "eval.loss < 0"})
    assert scheduler(changed, work, said).tick(at(0)).outcome == "promoted"
    assert f"tick {name(0)} continues with the configuration that it started with" in said


def test_commands_and_folders_are_those_of_the_file_whatever_the_store_says(
    packaged: Package, tmp_path: Path
) -> None:
    class Seen(Pretended):
        configs: list[Any] = []  # noqa: RUF012  # shared by the class on purpose

        def decide(self, trail: TickContext, *arguments: Any) -> Any:
            self.configs.append(trail.config)
            return super().decide(trail, *arguments)

    work = Seen(packaged, tmp_path)
    work.fail = failing("evaluate", 1)
    forged = {
        "notify": {"command": ["rm", "-rf", "/"]},
        "runs": "/",
        "handover": {"place": "/etc", "command": ["true"]},
    }
    with pytest.raises(TrainingError):
        scheduler(config_of(tmp_path / "store", **forged), work).tick(at(0))
    scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    (seen,) = work.configs
    assert (seen.notify, seen.handover, seen.runs) == (None, None, str(tmp_path / "runs"))


def test_where_another_release_was_made_current_meanwhile_the_challenger_stays_a_candidate(
    work: Pretended, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    scheduler(config_of(store), work).tick(at(0))

    def by_hand(stage: str) -> None:
        if stage == "decide":
            Store(store).promote(LINE, 1, reason="by hand")

    work.fail = by_hand
    ended = scheduler(config_of(store), work).tick(at(1))
    assert ended.outcome == "conflict"
    assert "release 1: by hand" in ended.reason
    assert [(state.release.name, state.status) for state in Store(store).releases(LINE)][-1] == (
        "3",
        "candidate",
    )


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make owners and waiters of a lease poll each other every few milliseconds."""
    monkeypatch.setattr(lease, "_BEATS", 1000)
    monkeypatch.setattr(tick, "_POLL_SECONDS", 0.01)


@pytest.mark.parametrize("taken", ["forbid", "queue"])
def test_two_ticks_of_a_line_do_not_run_at_once(
    work: Pretended, tmp_path: Path, taken: str, looking_often: None
) -> None:
    config = config_of(tmp_path / "store", lease={"seconds": "20s", "taken": taken})
    inside, go_on = threading.Event(), threading.Event()

    def stop(stage: str) -> None:
        if stage == "train":
            inside.set()
            assert go_on.wait(30)

    work.fail = stop
    first = threading.Thread(target=lambda: scheduler(config, work, owner="first").tick(at(0)))
    first.start()
    assert inside.wait(30)

    class Said(list[str]):
        """Messages of the second scheduler; the first one continues when it is waited for."""

        def append(self, line: str) -> None:
            super().append(line)
            if "waiting for tick" in line:
                go_on.set()

    other = scheduler(config, Pretended(work.package, tmp_path / "other"), Said(), owner="second")
    (tmp_path / "other").mkdir()
    if taken == "forbid":
        with pytest.raises(LeaseTakenError, match="another tick is running"):
            other.tick(at(1))
        go_on.set()
    else:
        assert other.tick(at(1)).outcome == "promoted"
    first.join()
    ended = Ticks(store_of(tmp_path), LINE).read(Ended, name(0))
    assert ended is not None
    assert ended.outcome == "promoted"


class Patient(Pretended):
    """Training that lasts until it is asked to stop."""

    inside = threading.Event()

    def train(self, trail: TickContext, snapshot: Snapshot) -> dict[str, Any]:
        self.inside.set()
        until = time.monotonic() + 30
        while trail.held.asked_to_stop is None and time.monotonic() < until:
            time.sleep(0.05)
        raise RunInterrupted("the run was asked to stop", where="step 3")


def test_a_tick_that_is_asked_to_stop_gives_way(
    packaged: Package, tmp_path: Path, looking_often: None
) -> None:
    config = config_of(tmp_path / "store", lease={"seconds": "6s", "taken": "replace"})
    first = Patient(packaged, tmp_path)
    thread = threading.Thread(target=lambda: scheduler(config, first, owner="first").tick(at(0)))
    thread.start()
    assert first.inside.wait(30)
    (tmp_path / "other").mkdir()
    assert (
        scheduler(config, Pretended(packaged, tmp_path / "other"), owner="second")
        .tick(at(1))
        .outcome
        == "promoted"
    )
    thread.join()
    ended = Ticks(store_of(tmp_path), LINE).read_required(Ended, name(0))
    assert (ended.outcome, ended.reason) == ("replaced", "second asked it to stop")


def test_the_same_tick_elsewhere_is_waited_for_and_not_asked_to_stop(
    packaged: Package, tmp_path: Path, looking_often: None
) -> None:
    config = config_of(tmp_path / "store", lease={"seconds": "6s", "taken": "replace"})
    first, asked = Patient(packaged, tmp_path), []
    said: list[str] = []
    first.inside = threading.Event()

    def train(trail: TickContext, snapshot: Snapshot) -> dict[str, Any]:
        first.inside.set()
        while (
            not any("waiting for tick" in line for line in said)
            and trail.held.asked_to_stop is None
        ):
            time.sleep(0.01)
        asked.append(trail.held.asked_to_stop)
        return Pretended.train(first, trail, snapshot)

    first.train = train  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: scheduler(config, first, owner="first").tick(at(0)))
    thread.start()
    assert first.inside.wait(30)
    (tmp_path / "other").mkdir()
    assert (
        scheduler(config, Pretended(packaged, tmp_path / "other"), said, owner="second")
        .tick(at(0))
        .outcome
        == "promoted"
    )
    thread.join()
    assert asked == [None]


def test_a_tick_whose_configuration_cannot_be_read_any_more_is_given_up(
    work: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            Config,
            "to_json",
            lambda config: {**config.model_dump(mode="json", by_alias=True), "of_tomorrow": 1},
        )
        ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert ended.outcome == "failed"
    assert "of_tomorrow: unknown key" in ended.reason
    assert scheduler(config_of(tmp_path / "store"), work).tick(at(1)).outcome == "promoted"


@pytest.mark.parametrize("verdict", ["rejected", "removed"])
def test_a_challenger_that_somebody_rejected_before_it_was_promoted_does_not_stop_the_line(
    work: Pretended, tmp_path: Path, verdict: str
) -> None:
    def by_hand(stage: str) -> None:
        if stage == "decide":
            store_of(tmp_path).mark(LINE, 2, verdict, "by hand")

    work.fail = by_hand
    ended = scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert ended.outcome == "conflict"
    assert f"the challenger was {verdict} in the meantime" in ended.reason
    work.fail = lambda _stage: None
    assert scheduler(config_of(tmp_path / "store"), work).tick(at(1)).outcome == "promoted"


def test_a_record_that_could_not_be_read_again_is_not_written(
    work: Pretended, tmp_path: Path
) -> None:
    scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    ticks = Ticks(store_of(tmp_path), LINE)
    snapshot = made_snapshot().model_copy(update={"empty": "x" * 8193})
    with pytest.raises(PackageError):
        ticks.write(Taken, name(1), snapshot=snapshot)
    assert ticks.read(Taken, name(1)) is None


def test_a_process_that_lost_its_lease_ends_without_a_word(work: Pretended, tmp_path: Path) -> None:
    def lose(stage: str) -> None:
        if stage == "evaluate":
            raise LeaseLostError("the lease is lost", where="the test")

    work.fail = lose
    with pytest.raises(LeaseLostError):
        scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    names = Ticks(store_of(tmp_path), LINE)
    assert (names.read(Trained, name(0)) is None, names.last_failure(name(0))) == (False, None)


def test_who_wants_to_know_is_told_before_the_tick_is_over(work: Pretended, tmp_path: Path) -> None:
    scheduler(config_of(tmp_path / "store"), work).tick(at(0))
    assert work.told == [(name(0), "promoted")]


def failing(stage: str, times: int) -> Any:
    """Return a callback that makes a stage fail the given number of times."""
    left = [times]

    def fail(at_stage: str) -> None:
        if at_stage == stage and left[0]:
            left[0] -= 1
            raise TrainingError("broken", where=f"the {stage} stage")

    return fail


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writes]:
    found = Writes()
    with found.counted(monkeypatch):
        yield found


@pytest.mark.matrix("False-promoted", "True-bad data", "False-diverged")
@pytest.mark.parametrize("kind", ["promoted", "rejected", "no data", "bad data", "diverged"])
@pytest.mark.parametrize("after", [False, True])
def test_a_tick_that_dies_at_any_write_ends_as_if_it_had_not(
    packaged: Package, tmp_path: Path, writes: Writes, kind: str, after: bool
) -> None:
    scheduler(config_of(tmp_path / "store"), Pretended(packaged, tmp_path)).tick(at(0))

    def made(folder: Path) -> tuple[Pretended, Any]:
        shutil.copytree(tmp_path / "store", folder / "store")
        work = Pretended(packaged, folder)
        {
            "rejected": work.worse,
            "no data": work.empty,
            "bad data": work.bad,
            "diverged": work.diverging,
        }.get(kind, set()).add(name(1))
        return work, config_of(folder / "store")

    work, config = made(tmp_path / "whole")
    writes.arm(None)
    scheduler(config, work).tick(at(1))
    wanted, count = summary(Store(config.store)), writes.count
    assert count >= 5
    for die_at in range(1, count + 1):
        writes.arm(None)
        work, config = made(tmp_path / f"died-{die_at}")
        writes.arm(die_at, after=after)
        with suppress(TrainloadError):  # the last write may fail after the tick is complete
            scheduler(config, work).tick(at(1))
        assert writes.dead
        writes.arm(None)
        scheduler(config, work).tick(at(1))
        found = summary(Store(config.store))
        assert found == wanted, f"killed at write {die_at} of {count}"
        assert Ticks(Store(config.store), LINE).count(Begun, name(1)) <= 2
        if kind == "promoted":
            assert Ticks(Store(config.store), LINE).read_required(Decided, name(1)).promote
