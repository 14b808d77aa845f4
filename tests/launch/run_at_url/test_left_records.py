"""Working copies of runs at URLs: who may remove, read and drive in one, and what a killed driver
leaves.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from tests.launch.checkpoint_places import Wire, wire_to
from tests.launch.forked import command
from tests.launch.run_at_url.local_runs import arguments, has_begun, launched, losses_at, summary_at
from tests.ranks import end, start
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.core.errors import ConflictError, StorageError
from trainload.core.storage.numbered_parts import NumberedParts
from trainload.core.storage.open_files import open_files
from trainload.launching.run import publication as publishing
from trainload.launching.run.driver import check_nothing, driving
from trainload.launching.run.journal import LOGS, Journal, append_log, losses, read_events
from trainload.launching.run.kept_records import publish_kept
from trainload.launching.run.publication import Publication, await_end
from trainload.launching.run.run_state import Summary, write_state
from trainload.launching.run.working_copy import KEPT_FILE, viewed, working_copy
from trainload.packaging.package import Package


def copies(machine: Path) -> list[Path]:
    return sorted(path.parent for path in machine.glob("runs/*/*/.place"))


def hold_copy(place: str, ready: Path) -> None:
    with working_copy(place):
        ready.touch()
        signal.pause()  # until it is killed


@contextmanager
def held(place: str | Path, ready: Path) -> Iterator[ForkServerProcess]:
    """A process with a working copy of its own, or in an existing one."""
    log = ready.with_suffix(".log")
    variables = dict(os.environ)
    process = start(hold_copy, str(place), ready, cwd=ready.parent, log=log, variables=variables)
    try:
        wait_until(ready.exists)
        yield process
    finally:
        end([process])


def test_the_copy_of_a_driver_whose_supervisor_was_killed_stays(
    url: str, machine: Path, tmp_path: Path
) -> None:
    with held(url, tmp_path / "supervisor") as supervisor:
        (copy,) = copies(machine)
        with held(copy, tmp_path / "driver"):
            supervisor.kill()
            supervisor.join()
            with working_copy(f"{url}-other"):
                assert copy.exists()
        with working_copy(f"{url}-other"):
            assert not copy.exists()


def test_a_copy_has_one_driver(url: str, machine: Path, tmp_path: Path) -> None:
    with held(url, tmp_path / "supervisor"):
        (copy,) = copies(machine)
        (copy / "events.jsonl").write_text("old")
        with held(copy, tmp_path / "driver"):
            assert not (copy / "events.jsonl").exists()
            (copy / "events.jsonl").write_text("its own")
            with pytest.raises(StorageError, match="another process drives"), working_copy(copy):
                pass
            assert (copy / "events.jsonl").read_text() == "its own"


def journal_of(machine: Path) -> bytes:
    (copy,) = copies(machine)
    return (copy / "events.jsonl").read_bytes()


def size_at(url: str) -> int:
    return sum(file.size for file in open_files(url).walk("events"))


@pytest.mark.slow
def test_what_a_driver_that_was_killed_in_an_outage_has_written_is_published_by_the_next_one(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, s3: str, machine: Path
) -> None:
    launched(tiny, tiny_data, tmp_path / "whole", steps=600)
    words = arguments(tiny, tiny_data, url, "--steps", "600", "--checkpoint-every", "1000000")
    wire = Wire(s3)
    with command(*words, cwd=tmp_path, AWS_ENDPOINT_URL=wire.url) as driver:
        wait_until(lambda: has_begun(url))
        wire.refuse = True
        wire.cut()
        published = size_at(url)
        wait_until(lambda: len(journal_of(machine)) > published + 3_000)
        driver.process.kill()
        driver.wait()
    wire.close()
    left = journal_of(machine)
    whole = left[: left.rfind(b"\n") + 1]
    assert cli.run(["status", url]) == 0
    assert journal_of(machine) == left
    trainload.resume(url, backend="local")
    with viewed(url) as run:
        assert (run.folder / "events.jsonl").read_bytes().startswith(whole)
    assert losses_at(url) == losses(read_events(tmp_path / "whole"))
    assert copies(machine) == []


def test_records_of_a_driver_that_was_replaced_elsewhere_stay_on_its_machine(
    url: str, machine: Path
) -> None:
    with working_copy(url) as folder:
        copy = folder
        (folder / KEPT_FILE).write_text("{}")
        Journal(folder).write("warning", message="only here")
    with working_copy(url) as folder, driving(folder, Publication(folder)):
        Journal(folder).write("warning", message="elsewhere")
        write_state(folder, 1, Summary(phase="ended"), {}, over=True)
    state = open_files(url).read("state.json", 2**20)
    publish_kept(url)
    with working_copy(f"{url}-other"):
        assert "only here" in (copy / "events.jsonl").read_text()
    assert open_files(url).read("state.json", 2**20) == state
    with viewed(url) as run:
        kinds = [event.data.get("message") for event in read_events(run.folder)]
    assert kinds == [None, "elsewhere"]


def test_logs_of_a_driver_that_was_killed_are_published_once(url: str, machine: Path) -> None:
    with working_copy(url) as folder, driving(folder, Publication(folder)):
        append_log(folder, 0, "earlier\n")
    with working_copy(url) as folder:
        first = Publication(folder)
        first.begin(check_nothing)
        append_log(folder, 0, "one\n")
        wait_until(lambda: len(open_files(url).names(f"{LOGS}/rank-00000")) == 2)
        for task in first._tasks.values():
            task._over.set()
            task.end()
        append_log(folder, 0, "two\n")
        first._held.close()
    publish_kept(url)
    assert logged(url) == "earlier\none\ntwo\n"
    assert copies(machine) == []


def logged(url: str) -> str:
    files = open_files(url)
    parts = [
        files.read(f"{LOGS}/rank-00000/{name}", 2**20) for name in files.names(f"{LOGS}/rank-00000")
    ]
    return b"".join(part or b"" for part in parts).decode()


def test_the_last_line_that_a_rank_has_printed_is_published(url: str, machine: Path) -> None:
    with working_copy(url) as folder, driving(folder, Publication(folder)):
        append_log(folder, 0, "one\ntwo")
    assert logged(url) == "one\ntwo"


def test_a_part_that_the_earlier_driver_had_sent_does_not_stop_the_next_one(
    url: str, machine: Path
) -> None:
    files = open_files(url)
    late = [b'{"kind":"warning","time":1.0,"data":{"message":"late"}}\n']

    def check() -> None:
        if late:  # between the driver's look at the journal and its first part
            files.create("events/00000001.jsonl", late.pop())

    with working_copy(url) as folder:
        publication = Publication(folder)
        publication.begin(check)
        Journal(folder).write("warning", message="new")
        publication.close()
    with viewed(url) as run:
        messages = [event.data.get("message") for event in read_events(run.folder)]
    assert messages == ["late", None, "new"]


def test_an_earlier_driver_can_add_nothing_once_the_next_one_has_begun(
    url: str, machine: Path
) -> None:
    with working_copy(url) as before, working_copy(url) as after:
        earlier = NumberedParts(open_files(url), "events", before / "events.jsonl")
        earlier.fetch()
        publication = Publication(after)
        publication.begin(check_nothing)
        Journal(before).write("warning", message="late")
        with pytest.raises(ConflictError):
            earlier.publish()
        publication.close()


def test_what_another_process_writes_into_the_journal_is_an_error(
    url: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "LAST_SECONDS", 0.0)
    with working_copy(url) as folder:
        publication = Publication(folder)
        publication.begin(check_nothing)
        open_files(url).create("events/00000002.jsonl", b"no event\n")
        Journal(folder).write("warning", message="mine")
        with pytest.raises(StorageError, match="another process writes this file"):
            publication.close()
    assert copies(machine) == [folder]


def is_at_step(url: str, step: int) -> bool:
    return bool(summary_at(url).get("step") == step)


def test_a_state_is_published_while_logs_are_not(
    url: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    publish = NumberedParts.publish

    def stuck(self: NumberedParts, *, is_whole: bool = False) -> None:
        if "rank" in self._folder:
            goes_on.wait()
        publish(self, is_whole=is_whole)

    monkeypatch.setattr(NumberedParts, "publish", stuck)
    with working_copy(url) as folder, driving(folder, Publication(folder)):
        append_log(folder, 0, "one\n")
        for step in range(3):
            write_state(folder, 1, Summary(step=step, phase="running"), {})
            wait_until(partial(is_at_step, url, step))
        goes_on.set()
    assert logged(url) == "one\n"


def test_a_final_state_is_published_after_the_last_events(
    url: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working_copy(url) as folder, driving(folder, Publication(folder)):
        write_state(folder, 1, Summary(phase="ended"), {}, over=True)
        open_files(url).replace("stop", b"")
        wait_until((folder / "stop").exists)  # the thread has looked
        assert summary_at(url).get("phase") != "ended"
    assert summary_at(url)["phase"] == "ended"


def test_a_file_of_a_sink_is_sent_while_it_grows(url: str, machine: Path) -> None:
    ended = threading.Event()

    def grow(path: Path) -> None:
        with path.open("ab", buffering=0) as file:
            while not ended.wait(0.0001):
                file.write(b"x" * 1000)

    with working_copy(url) as folder, driving(folder, Publication(folder)):
        path = folder / "tensorboard"
        path.write_bytes(bytes(2**24))
        writer = threading.Thread(target=grow, args=(path,))
        writer.start()
        publication = Publication(folder)
        for _ in range(3):
            publication.send_results()
            assert (open_files(url).size("tensorboard") or 0) >= 2**24
        ended.set()
        writer.join()


def test_reading_the_copy_of_a_driver_leaves_it_alone(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, machine: Path
) -> None:
    words = arguments(tiny, tiny_data, url, "--steps", "1000000")
    with command(*words, cwd=tmp_path) as driver:
        wait_until(lambda: has_begun(url))
        (copy,) = copies(machine)
        for name in ("status", "logs"):
            before = (copy / "events.jsonl").stat().st_size
            assert cli.run([name, str(copy)]) == 0
            assert (copy / "events.jsonl").stat().st_size >= before
        assert cli.run(["stop", str(copy)]) == 0
        assert driver.wait() == 1
    assert summary_at(url)["phase"] == "stopped"


def test_a_request_to_an_earlier_run_does_not_stop_a_new_one(
    tiny: Package, tiny_data: Path, url: str
) -> None:
    open_files(url).replace("stop", b"0.0")
    assert launched(tiny, tiny_data, url).steps == 6


def test_a_run_ends_when_its_records_cannot_be_published_for_too_long(
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    url: str,
    s3: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "LAST_SECONDS", 0.0)
    with wire_to(s3) as wire:

        def fail(event: trainload.Event) -> None:
            if event.kind == "step" and event.data["step"] == 5:
                wire.refuse = True
                wire.cut()

        with pytest.raises(StorageError, match="the run's records cannot be published"):
            launched(
                tiny,
                tiny_data,
                url,
                steps=10**6,
                checkpoint_every=10**6,
                storage_patience=3.0,
                on_event=fail,
            )
    (copy,) = copies(machine)
    kinds = [event.kind for event in read_events(copy)]
    assert kinds.count("warning") == 1
    assert kinds[-1] == "failed"


def test_other_machines_read_the_records_of_the_one_that_drives(url: str, machine: Path) -> None:
    def drive() -> None:
        with working_copy(url) as folder, driving(folder, Publication(folder)):
            Journal(folder).write("end", step=1)
            write_state(folder, 1, Summary(phase="ended"), {}, over=True)

    thread = threading.Thread(target=drive)
    with working_copy(url) as folder:
        thread.start()
        await_end(folder)
        assert read_events(folder)[-1].kind == "end"
    thread.join()


def test_a_file_that_cannot_be_sent_is_a_warning(
    url: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("no")

    warnings: list[str] = []
    with working_copy(url) as folder:
        publication = Publication(folder, patience=0.0)
        publication.begin(check_nothing)
        (folder / "tensorboard").write_bytes(b"x")
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "send_file", fail)
            publication._tasks["files"].once()
            for _ in range(2):
                publication.check(warnings.append)
        assert len(warnings) == 1
        publication.close()
    assert open_files(url).size("tensorboard") == 1
