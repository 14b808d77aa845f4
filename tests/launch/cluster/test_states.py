"""States of a supervised run, on a simulated cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.launch.cluster.simulated_cluster import (
    HANG_SECONDS,
    MAX_FAILURES,
    PATIENCE,
    STEPS,
    Driver,
)

from trainload.core.errors import (
    ClusterError,
    DataError,
    LostClusterError,
    RunInterrupted,
    StorageError,
    TrainingError,
)
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.cluster import states
from trainload.launching.cluster.inbox import LOST_SECONDS
from trainload.launching.cluster.reservation import DevicesTakenError
from trainload.launching.cluster.states import (
    GROW_SECONDS,
    TAKEN_SECONDS,
    Ended,
    Placing,
    Preparing,
    Recovering,
    Resizing,
    Running,
    Stopping,
)
from trainload.launching.run import straggler
from trainload.launching.run.activity import Phase
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import JOURNAL, Event, read_events
from trainload.launching.run.run_state import (
    STATE_FILE,
    STATE_SECONDS,
    Summary,
    read_state,
    write_state,
)

FAILED = StorageError("no data")


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path, "a", "b")


# The way of a run without failures


def test_a_run_goes_from_placing_to_its_end(driver: Driver) -> None:
    passed = [type(driver.state)]
    while not isinstance(driver.state, Ended):
        if driver.cluster.attempts and driver.cluster.attempt.at_work:
            driver.cluster.attempt.take_step()
        driver.advance()
        if type(driver.state) is not passed[-1]:
            passed.append(type(driver.state))
    assert passed == [Placing, Preparing, Running, Ended]


def test_it_waits_for_free_nodes(driver: Driver) -> None:
    driver.cluster.taken = {"b"}
    driver.advance()
    driver.advance(seconds=2)
    assert isinstance(driver.state, Placing)
    assert driver.messages("waiting") == ["for 2 free CPUs; by node there are 1 of 1, 0 of 1"]
    driver.cluster.taken = set()
    assert isinstance(driver.advance(), Preparing)


def test_too_few_nodes_for_too_long_end_it(driver: Driver) -> None:
    driver.cluster.taken = {"b"}
    driver.advance()
    with pytest.raises(ClusterError, match="too few free nodes"):
        driver.advance(seconds=PATIENCE + 1)


def test_the_state_is_written_every_second(driver: Driver, tmp_path: Path) -> None:
    driver.train()
    written = 0
    for _ in range(100):
        (tmp_path / STATE_FILE).unlink(missing_ok=True)
        driver.cluster.attempt.report()
        driver.advance()
        written += (tmp_path / STATE_FILE).exists()
    assert 9 <= written * STATE_SECONDS <= 11


# Storage


def refuse_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_file(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(states, "replace_file", replace_file)


def test_a_folder_that_cannot_be_written_ends_a_run_that_has_not_begun(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_storage(monkeypatch)
    with pytest.raises(StorageError, match="cannot be written: Input/output error"):
        driver.advance()


def test_a_run_that_has_stepped_waits_for_storage(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.train().raise_error(FAILED)
    driver.reach(Placing)
    with monkeypatch.context() as broken:
        refuse_storage(broken)
        driver.advance(seconds=PATIENCE / 2)
        assert isinstance(driver.state, Placing)
    assert isinstance(driver.advance(), Preparing)


def test_a_driver_whose_storage_does_not_answer_goes_on(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(path: Path) -> bool:
        raise OSError(5, "Input/output error")

    driver.train()
    monkeypatch.setattr(Path, "exists", exists)
    driver.cluster.attempt.report()
    assert isinstance(driver.advance(), Running)


# Failures


def test_a_dead_rank_is_reported_and_the_run_restarts(driver: Driver) -> None:
    driver.train().die(1)
    driver.reach(Preparing)
    assert driver.messages("failure") == ["rank 1 died: killed"]
    assert len(driver.cluster.attempts) == 2


def test_a_lost_node_is_not_used_until_it_responds(driver: Driver) -> None:
    attempt = driver.train()
    driver.cluster.alive.discard("b")
    attempt.lose("b")
    driver.reach(Placing)
    driver.advance()
    assert isinstance(driver.state, Placing)
    assert driver.messages("failure") == ["node b is gone, with rank 1"]
    driver.cluster.alive.add("b")
    assert isinstance(driver.advance(), Preparing)


def test_ranks_that_hang_are_killed(driver: Driver) -> None:
    attempt = driver.train()
    driver.advance(seconds=HANG_SECONDS + 1)
    driver.reach(Recovering)
    assert attempt.killed == (0, 1)
    assert driver.messages("failure")[0].startswith("ranks 0, 1 wait in the same place")


def test_an_error_of_the_job_ends_the_run(driver: Driver) -> None:
    driver.train().raise_error(DataError("a row is bad"))
    with pytest.raises(DataError, match="a row is bad"):
        driver.advance()


def test_an_error_of_storage_before_the_first_step_ends_the_run(driver: Driver) -> None:
    driver.train(steps=0).raise_error(FAILED)
    with pytest.raises(StorageError, match="no data"):
        driver.advance()


def test_too_many_failures_in_a_row_end_the_run(driver: Driver) -> None:
    for _ in range(MAX_FAILURES):
        driver.train().die(0)
        driver.reach(Recovering)
        driver.advance(seconds=60)
    driver.train().die(0)
    with pytest.raises(TrainingError, match=r"rank 0 died: killed.*got one more"):
        driver.advance()


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_not_tried_forever(
    driver: Driver,
) -> None:
    for seconds in (0, PATIENCE + 1):
        attempt = driver.train()
        driver.clock.now += seconds
        attempt.raise_error(FAILED, Phase.ENDING)
        if not seconds:
            driver.reach(Placing)
    with pytest.raises(StorageError, match="no data"):
        driver.advance()


def test_a_second_attempt_knows_that_there_was_a_checkpoint(driver: Driver) -> None:
    attempt = driver.train()
    attempt.save()
    attempt.die(0)
    driver.reach(Preparing)
    assert driver.run.spec.had_checkpoint


def test_devices_that_were_taken_meanwhile_are_no_failure(driver: Driver) -> None:
    driver.advance()
    driver.cluster.attempt.error = DevicesTakenError("a")
    driver.cluster.attempt.end()
    assert isinstance(driver.advance(), Placing)
    assert driver.messages("failure") == []


def test_two_runs_that_take_devices_from_one_another_do_not_retry_together(
    driver: Driver,
) -> None:
    pauses = set()
    for _ in range(3):
        driver.reach(Preparing)
        driver.cluster.attempt.error = DevicesTakenError("a")
        driver.cluster.attempt.end()
        driver.reach(Placing)
        began = driver.clock.now
        while isinstance(driver.state, Placing):
            driver.advance()
        pauses.add(driver.clock.now - began)
    assert len(pauses) == 3
    assert max(pauses) < TAKEN_SECONDS + 1


def test_devices_that_are_taken_meanwhile_do_not_extend_the_patience(driver: Driver) -> None:
    driver.advance()
    driver.advance(seconds=PATIENCE - 1)
    driver.cluster.attempt.error = DevicesTakenError("a")
    driver.cluster.attempt.end()
    assert isinstance(driver.advance(), Placing)
    driver.cluster.taken = {"b"}
    with pytest.raises(ClusterError, match="too few free nodes"):
        driver.advance(seconds=2 + TAKEN_SECONDS)


def test_a_run_that_has_trained_waits_anew(driver: Driver) -> None:
    attempt = driver.train()
    driver.advance(seconds=PATIENCE - 1)
    attempt.die(0)
    driver.reach(Recovering)
    driver.cluster.taken = {"b"}
    driver.reach(Placing)
    driver.advance(seconds=2)
    assert isinstance(driver.state, Placing)


def test_a_run_that_moves_while_it_prepares_waits_anew(driver: Driver) -> None:
    driver.train().die(0)
    driver.reach(Preparing)
    driver.cluster.leaving = {"b"}
    driver.cluster.alive.add("c")
    driver.cluster.listed.add("c")
    driver.advance(seconds=PATIENCE - 1)
    assert isinstance(driver.state, Resizing)
    driver.cluster.attempt.end()
    driver.cluster.taken = {"c"}
    driver.reach(Placing)
    driver.advance(seconds=2)
    assert isinstance(driver.state, Placing)


def test_a_rank_that_is_slower_than_the_others_is_reported(driver: Driver) -> None:
    attempt = driver.train()
    for number in range(1, 2 * straggler.STEPS + 1):
        attempt.report(worked={0: (number, 0.1 * number), 1: (number, 0.3 * number)})
        driver.advance(seconds=straggler.SECONDS / straggler.STEPS)
    (message,) = driver.messages("warning")
    assert message.startswith("rank 1 (node b, GPU 5) is 3.0 times slower than the others: 0.3 s")


def test_ranks_that_never_report_hang(driver: Driver) -> None:
    driver.advance()
    attempt = driver.cluster.attempt
    attempt.trains.set()
    driver.reach(Running)
    driver.advance(seconds=10 * HANG_SECONDS + 1)
    driver.reach(Recovering)
    assert attempt.killed == (0, 1)
    assert driver.messages("failure")[0].startswith("ranks 0, 1 never reported")


def test_a_run_that_stops_while_it_reserves_devices_is_stopped(
    driver: Driver, tmp_path: Path
) -> None:
    driver.advance()
    (tmp_path / Request.STOP.file).touch()
    driver.reach(Stopping)
    driver.cluster.attempt.error = DevicesTakenError("a")
    driver.cluster.attempt.end()
    assert isinstance(driver.advance(), Placing)
    with pytest.raises(RunInterrupted, match="the run was asked to stop"):
        driver.advance()


# Requests


def test_a_stop_file_stops_the_run_with_a_checkpoint(driver: Driver, tmp_path: Path) -> None:
    attempt = driver.train()
    (tmp_path / Request.STOP.file).touch()
    assert isinstance(driver.advance(), Stopping)
    attempt.take_step()
    with pytest.raises(RunInterrupted, match="the run was interrupted"):
        driver.advance()
    assert driver.cluster.saved == attempt.step
    assert not (tmp_path / Request.STOP.file).exists()


def test_a_run_that_fails_while_it_stops_is_stopped(driver: Driver, tmp_path: Path) -> None:
    attempt = driver.train()
    (tmp_path / Request.STOP.file).touch()
    driver.reach(Stopping)
    attempt.die(0)
    driver.reach(Recovering)
    with pytest.raises(RunInterrupted, match="the run was asked to stop"):
        driver.advance()


def test_a_run_that_ends_while_it_stops_is_whole(driver: Driver, tmp_path: Path) -> None:
    attempt = driver.train(steps=STEPS - 1)
    (tmp_path / Request.STOP.file).touch()
    driver.reach(Stopping)
    attempt.take_step()
    assert isinstance(driver.advance(), Ended)


def test_a_stop_is_met_while_it_waits_for_nodes(driver: Driver, tmp_path: Path) -> None:
    driver.cluster.taken = {"b"}
    driver.advance()
    (tmp_path / Request.STOP.file).touch()
    with pytest.raises(RunInterrupted, match="the run was asked to stop"):
        driver.advance()


def interrupt(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance, with Ctrl-C while the driver waits."""

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr(driver.supervisor, "_sleep", sleep)
        driver.advance()


def test_the_first_ctrl_c_stops_after_the_step(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.train()
    interrupt(driver, monkeypatch)
    assert isinstance(driver.advance(), Stopping)


def test_the_second_ctrl_c_ends_the_run_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.train()
    interrupt(driver, monkeypatch)
    driver.reach(Stopping)
    with pytest.raises(KeyboardInterrupt):
        interrupt(driver, monkeypatch)


def test_ctrl_c_before_the_first_step_ends_the_run_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.train(steps=0)
    with pytest.raises(KeyboardInterrupt):
        interrupt(driver, monkeypatch)


# Nodes that come and go

WARNED = "node b will be removed: a checkpoint is written; no other node is available yet"
LEFT = "node b will be removed: the run moves to other nodes, with a checkpoint"


def look(driver: Driver) -> None:
    """Advance through a second, in which the driver looks at its nodes."""
    driver.cluster.attempt.report()
    driver.advance(seconds=STATE_SECONDS)


def test_a_run_whose_node_will_be_removed_saves_and_says_so_once(
    driver: Driver, tmp_path: Path
) -> None:
    driver.train()
    driver.cluster.leaving = {"b"}
    for _ in range(3):
        look(driver)
    assert driver.messages("preemption") == [WARNED]
    assert (tmp_path / Request.CHECKPOINT.file).exists()


def test_it_moves_as_soon_as_there_is_another_node(driver: Driver) -> None:
    attempt = driver.train()
    driver.cluster.leaving = {"b"}
    look(driver)
    driver.cluster.alive.add("c")
    driver.cluster.listed.add("c")
    look(driver)
    assert isinstance(driver.state, Resizing)
    assert driver.messages("preemption") == [WARNED, LEFT]
    driver.advance()
    attempt.take_step()
    driver.reach(Preparing)
    assert driver.cluster.attempt.seats == ("a", "c")


def test_a_run_that_has_not_stepped_does_not_move(driver: Driver) -> None:
    driver.train(steps=0)
    driver.cluster.leaving = {"b"}
    driver.cluster.alive.add("c")
    driver.cluster.listed.add("c")
    look(driver)
    assert isinstance(driver.state, Running)


def test_a_run_grows_once_there_has_been_room_for_a_while(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "a", worlds=(1, 2))
    driver.train()
    driver.cluster.alive.add("b")
    driver.cluster.listed.add("b")
    for _ in range(int(GROW_SECONDS)):
        look(driver)
        assert isinstance(driver.state, Running)
    look(driver)
    look(driver)
    assert isinstance(driver.state, Resizing)
    driver.advance()
    driver.cluster.attempt.take_step()
    driver.reach(Preparing)
    assert driver.messages("resize") == ["1 -> 2 ranks"]


def test_a_run_shrinks_to_the_nodes_that_are_left(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "a", "b", worlds=(1, 2))
    attempt = driver.train()
    driver.cluster.alive.discard("b")
    attempt.lose("b")
    driver.reach(Preparing)
    assert driver.cluster.attempt.seats == ("a",)


# The cluster and the lease


def test_a_cluster_that_is_silent_for_a_while_is_waited_for(driver: Driver) -> None:
    driver.train()
    driver.cluster.answers = False
    driver.clock.now += 0.5  # not yet time to look at the nodes
    driver.advance()
    assert isinstance(driver.state, Running)
    driver.cluster.answers = True
    driver.cluster.attempt.take_step()
    driver.advance()
    assert len([event for event in driver.events if event.kind == "step"]) == 2


def test_the_last_messages_of_an_attempt_are_not_missed(driver: Driver) -> None:
    attempt = driver.train(steps=STEPS - 1)
    driver.cluster.answers = False
    attempt.take_step()
    driver.advance()
    assert isinstance(driver.state, Running)
    driver.cluster.answers = True
    driver.reach(Ended)
    assert driver.events[-1].kind == "end"


def run_whole(driver: Driver) -> None:
    """Drive from the beginning as a launch does, with the cluster that `driver` has."""
    driver.supervisor.run()


def test_a_cluster_that_is_gone_ends_the_run(driver: Driver) -> None:
    driver.cluster.vanish()
    with pytest.raises(LostClusterError, match="no longer responds"):
        run_whole(driver)


def test_a_silent_mailbox_ends_the_run_in_the_end(driver: Driver) -> None:
    driver.train()
    driver.cluster.answers = False
    driver.run.is_time_to_look()
    driver.advance()
    with pytest.raises(Exception, match="no answer"):
        driver.advance(seconds=LOST_SECONDS)


def test_a_replaced_driver_leaves_journal_and_state_to_the_other(tmp_path: Path) -> None:
    def check_driver() -> None:
        raise LeaseLostError("the lease is lost")

    driver = Driver(tmp_path, "a", "b", check_driver=check_driver)
    with pytest.raises(LeaseLostError):
        run_whole(driver)
    assert not (tmp_path / JOURNAL).exists()
    assert read_state(tmp_path) is None
    assert driver.cluster.attempts == []


# Requests that were made while there was no driver


def lost(run_dir: Path, *, over: bool = False, error: str = "") -> None:
    """Write the state file of a driver that was last heard of ten seconds ago."""
    summary = Summary()
    if error:
        summary.take(Event("failed", {"message": "so it is", "error": error}, 1.0))
    write_state(run_dir, 1, summary, {}, over=over)
    before = (run_dir / STATE_FILE).stat().st_mtime - 10
    os.utime(run_dir / STATE_FILE, (before, before))


@pytest.mark.parametrize(("over", "error"), [(False, ""), (True, "LostClusterError")])
def test_a_stop_that_was_requested_while_there_was_no_driver_is_met(
    driver: Driver, tmp_path: Path, over: bool, error: str
) -> None:
    lost(tmp_path, over=over, error=error)
    (tmp_path / Request.STOP.file).touch()
    with pytest.raises(RunInterrupted, match="the run was asked to stop"):
        run_whole(driver)
    state = read_state(tmp_path)
    assert state is not None
    assert state.phase == "stopped"
    assert [event.kind for event in read_events(tmp_path)] == ["stopped"]
    assert not (tmp_path / Request.STOP.file).exists()


@pytest.mark.parametrize(
    "case", ["older than the last word", "of a run that was over", "of a run that had none"]
)
def test_an_earlier_stop_is_forgotten(driver: Driver, tmp_path: Path, case: str) -> None:
    if case != "of a run that had none":
        lost(tmp_path, over="over" in case, error="TrainingError" if "over" in case else "")
    (tmp_path / Request.STOP.file).touch()
    if "older" in case:
        os.utime(tmp_path / Request.STOP.file, (1.0, 1.0))
    driver.cluster.vanish()
    with pytest.raises(LostClusterError):
        run_whole(driver)
    assert not (tmp_path / Request.STOP.file).exists()
