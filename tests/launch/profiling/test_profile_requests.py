"""The way of a request for a profile, from a file to rank 0, without a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch.cluster.simulated_cluster import Driver

from trainload.launching.cluster.mailbox import Mailbox, NodeReport
from trainload.launching.cluster.states import Preparing, Running
from trainload.launching.run.contact import (
    REQUEST_FILES,
    FileContact,
    Request,
    asked_by_file,
    clear_requests,
    withdraw,
)
from trainload.launching.run.profile_request import (
    PROFILE_FILE,
    ProfileRequest,
    parse_profile_request,
)
from trainload.launching.run.run_state import Summary

WANTED = ProfileRequest("a1", 3, (0, 2), trace_only=True)


def write(run_dir: Path, request: ProfileRequest = WANTED) -> Path:
    path = run_dir / PROFILE_FILE
    path.write_bytes(request.to_json())
    return path


def test_its_file_has_the_whole_request() -> None:
    assert parse_profile_request(WANTED.to_json()) == WANTED


def test_it_waits_for_a_checkpoint_and_a_stop(tmp_path: Path) -> None:
    write(tmp_path)
    assert FileContact(tmp_path, 0, Summary()).asked() == WANTED
    for request in (Request.CHECKPOINT, Request.STOP):
        (tmp_path / request.file).touch()
        assert asked_by_file(tmp_path) is request


def test_it_is_withdrawn_alone(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / Request.CHECKPOINT.file).touch()
    withdraw(tmp_path, WANTED)
    assert [path.name for path in tmp_path.iterdir()] == [Request.CHECKPOINT.file]


def test_a_run_begins_without_requests(tmp_path: Path) -> None:
    for name in REQUEST_FILES:
        (tmp_path / name).touch()
    clear_requests(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"3", b'{"id": "a", "steps": "many"}'])
def test_a_file_without_a_request_is_removed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PROFILE_FILE).write_bytes(content)
    assert asked_by_file(tmp_path) is Request.NONE
    assert not (tmp_path / PROFILE_FILE).exists()


def test_the_mailbox_has_it_until_it_is_complete() -> None:
    box = Mailbox()
    box.begin(1)
    box.collect(WANTED, 0, 0)
    assert box.report(1, "a", 1, NodeReport([], [], {}, [], None))[0] == WANTED
    assert box.report(1, "a", 2, NodeReport([], [], {}, [WANTED], None))[0] is Request.NONE
    assert box.collect(WANTED, 0, 0).met == [WANTED]


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path, "a", "b")


def test_it_reaches_the_ranks(driver: Driver, tmp_path: Path) -> None:
    attempt = driver.train()
    write(tmp_path)
    driver.advance()
    attempt.report()
    assert attempt.request == WANTED
    attempt.report(met=[WANTED])
    driver.advance()
    assert not (tmp_path / PROFILE_FILE).exists()
    assert isinstance(driver.state, Running)


def test_the_next_attempt_does_not_meet_it(driver: Driver, tmp_path: Path) -> None:
    attempt = driver.train()
    write(tmp_path)
    driver.advance()
    attempt.die(1)
    driver.reach(Preparing)
    assert not (tmp_path / PROFILE_FILE).exists()
    (event,) = [event for event in driver.events if event.kind == "profile"]
    assert event.data == {
        "id": "a1",
        "error": "the attempt ended before the profile was complete",
    }
    driver.train()
    driver.cluster.attempt.report()
    assert driver.cluster.attempt.request is Request.NONE


def test_one_that_was_made_before_an_attempt_waits_for_it(driver: Driver, tmp_path: Path) -> None:
    write(tmp_path)
    attempt = driver.train()
    attempt.report()
    assert attempt.request == WANTED
