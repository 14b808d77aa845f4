"""One process at a time runs a line's ticks, and one that was paused too long cannot promote."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.launch.forked import Talk, talking
from tests.packaging.places import retrained
from tests.retraining import leasing

from trainload.core.errors import ConflictError, StorageError
from trainload.core.storage import lease
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.lease import LeaseLostError, OtherLease
from trainload.packaging.package import Package
from trainload.packaging.stores.push import push
from trainload.packaging.stores.store import Store
from trainload.retraining.ticks.line_lease import Held, LineLeases

LINE = "main"
SHORT = 3.0
PAUSE = 0.3
REAL_TIME = time.time


@pytest.fixture(scope="module")
def pushed(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with release 1, which is current, and release 2. No test changes it."""
    folder = tmp_path_factory.mktemp("stores")
    push(packaged.path, folder / "store", line=LINE)
    push(
        retrained(packaged, folder / "second.tl", "lin.weight").path,
        folder / "store",
        line=LINE,
        promote=False,
    )
    return folder / "store"


@pytest.fixture
def store(pushed: Path, tmp_path: Path) -> Store:
    """A copy of that store."""
    return Store(shutil.copytree(pushed, tmp_path / "store"))


def taken(store: Store, owner: str, seconds: float = 30.0) -> Held:
    held = LineLeases(store, LINE, owner).take_for("20261123T060000Z", seconds)
    assert isinstance(held, Held)
    return held


def clock_at(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """Set this process's clock ahead of its machine's by this many seconds."""
    monkeypatch.setattr(time, "time", lambda: REAL_TIME() + ahead)


@contextmanager
def child(store: Store, seconds: float = 30.0, beats: int | None = None) -> Iterator[Talk]:
    """Yield a process that holds the lease. `beats`: number of heartbeats in these seconds."""
    with talking(leasing.main, store.url, LINE, str(seconds), "20261123T060000Z", beats) as process:
        assert answer(process) == "00000001"
        yield process


def answer(process: Talk, command: str | None = None) -> object:
    if command is not None:
        process.say(command)
    return json.loads(process.hear())


@pytest.fixture
def watched_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch a silent owner only for a moment."""
    monkeypatch.setattr(lease, "_WATCHED", 0.01)


def test_one_process_has_the_lease(store: Store) -> None:
    first = taken(store, "first")
    other = LineLeases(store, LINE, "second").take_for("20261123T070000Z", 30.0)
    assert isinstance(other, OtherLease)
    assert (other.record.owner, other.record.tick) == ("first", "20261123T060000Z")
    assert 0 < other.left <= 30.0
    first.close()


def test_a_lease_that_was_given_back_can_be_taken_at_once(store: Store) -> None:
    taken(store, "first").close()
    second = taken(store, "second")
    assert second.id == "00000002"
    second.close()


def test_after_one_that_was_given_back_the_history_of_current_does_not_go_on(store: Store) -> None:
    taken(store, "first").close()
    taken(store, "second").close()
    assert len(store.history(LINE)) == 1


def test_lines_have_leases_of_their_own(store: Store) -> None:
    first = taken(store, "first")
    other = LineLeases(store, "another", "second").take_for("20261123T060000Z", 30.0)
    first.close()
    assert isinstance(other, Held)
    other.close()


def test_an_owner_renews_its_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_BEATS", 1000)
    leases = LineLeases(store, LINE, "first")
    first = leases.take_for("20261123T060000Z", 30.0)
    assert isinstance(first, Held)
    beats = [leases._heartbeat(first.id)]
    while len(beats) < 3:
        if (beat := leases._heartbeat(first.id)) != beats[-1]:
            beats.append(beat)
    assert [beat.until for beat in beats if beat] == sorted({beat.until for beat in beats if beat})
    first.check()
    first.close()


def test_an_owner_that_was_killed_on_this_machine_is_replaced_at_once(store: Store) -> None:
    with child(store) as process:
        process.kill()
        taken(store, "second").close()


def test_an_owner_of_another_machine_that_was_killed_is_replaced_when_its_time_is_over(
    store: Store, monkeypatch: pytest.MonkeyPatch, watched_shortly: None
) -> None:
    with child(store, SHORT) as process:
        process.kill()
    monkeypatch.setattr(lease, "has_ended", lambda _process: False)
    clock_at(monkeypatch, -3600.0)
    assert isinstance(
        LineLeases(store, LINE, "second").take_for("20261123T070000Z", SHORT), OtherLease
    )
    clock_at(monkeypatch, 60.0)
    taken(store, "second").close()


def test_who_takes_the_place_of_a_silent_owner_says_so_in_the_history_of_current(
    store: Store,
) -> None:
    with child(store) as process:
        process.kill()
    held = taken(store, "second")
    history = store.history(LINE)
    assert [entry.release for entry in history] == ["00000001", "00000001"]
    assert "lease 2 replaces lease 1" in history[-1].reason
    assert held.after == history[-1].id
    held.close()


def test_an_owner_that_was_paused_for_too_long_knows_that_it_lost_its_lease(store: Store) -> None:
    with child(store, PAUSE) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE)  # the pause itself
        process.send_signal(signal.SIGCONT)
        assert answer(process, "demand") == "LeaseLostError"


def test_an_owner_that_was_paused_cannot_promote_even_if_it_does_not_ask(
    store: Store, monkeypatch: pytest.MonkeyPatch, watched_shortly: None
) -> None:
    with child(store, SHORT) as process:
        process.send_signal(signal.SIGSTOP)
        clock_at(monkeypatch, 60.0)
        second = taken(store, "second")
        process.send_signal(signal.SIGCONT)
        assert answer(process, "promote 2") == "ConflictError"
        second.close()
    pointer = store.current(LINE)
    assert pointer is not None
    assert pointer.release == "00000001"


def test_the_owner_can_promote(store: Store) -> None:
    with child(store) as process:
        assert answer(process, "promote 2") == "00000002"


def test_a_promotion_that_must_follow_another_entry_fails(store: Store) -> None:
    store.promote(LINE, 2, after="00000001")
    with pytest.raises(ConflictError, match="the line's history has changed"):
        store.promote(LINE, 1, after="00000001")


def test_a_living_lease_is_not_taken_by_a_clock_that_is_ahead(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(store, 12.0, beats=1000):
        clock_at(monkeypatch, 3600.0)
        assert isinstance(
            LineLeases(store, LINE, "second").take_for("20261123T070000Z", SHORT), OtherLease
        )


def test_an_owner_hears_that_it_is_asked_to_stop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_BEATS", 1000)
    first = taken(store, "first")
    LineLeases(store, LINE, "second").ask_to_stop(first.id)
    while first.asked_to_stop is None:
        time.sleep(0.01)
    assert first.asked_to_stop == "second"
    first.close()


def test_an_owner_whose_store_fails_loses_its_lease(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = taken(store, "first", SHORT)

    def broken(self: FolderFiles, path: str, data: bytes) -> None:
        raise StorageError("the store cannot be written", where=path)

    monkeypatch.setattr(FolderFiles, "replace", broken)
    seconds = lease._seconds
    monkeypatch.setattr(lease, "_seconds", lambda: seconds() + SHORT)
    with pytest.raises(LeaseLostError, match=f"it could not be renewed for {SHORT:g} s"):
        first.check()
    first.close()


def test_one_who_fails_before_the_history_has_gone_on_has_not_given_the_lease_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, watched_shortly: None
) -> None:
    with child(store) as process:
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(lease, "has_ended", lambda _process: True)

            def broken(self: Store, line: str, reason: str) -> None:
                raise StorageError("the store cannot be written", where=line)

            patch.setattr(Store, "confirm", broken)
            with pytest.raises(StorageError):
                LineLeases(store, LINE, "second").take_for("20261123T070000Z", SHORT)
        clock_at(monkeypatch, 60.0)
        taken(store, "third").close()
        process.send_signal(signal.SIGCONT)
        assert answer(process, "promote 2") == "ConflictError"


def test_a_store_that_cannot_keep_two_writers_apart_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderFiles, "exclusive", False)
    with pytest.raises(StorageError, match="does not support conditional writes"):
        LineLeases(Store(store.url), LINE)
