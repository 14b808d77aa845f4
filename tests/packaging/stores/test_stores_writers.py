"""Concurrent writers of one store, and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.places import Place, child, retrained, s3_place
from tests.packaging.pushing import told_by
from tests.ranks import ran

from trainload.core.errors import ConflictError
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.stores.pull import pull
from trainload.packaging.stores.push import push

WRITERS = 3
EACH = 3


def started(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip() == '"ready"', process.stderr.read() if process.stderr else ""


def writer(
    place: Place, *packages: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return child(
        "pushing.py",
        "push",
        place.url,
        "main",
        *packages,
        environment={**place.environment, **(environment or {})},
    )


def told(
    *words: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run `pushing.py` in a forked process. Return its report on each push."""
    status, said = ran(told_by, [str(word) for word in words], cwd=cwd, variables=environment or {})
    assert status == 0, said
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="session")
def many(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> list[Package]:
    """Packages with different weights."""
    folder = tmp_path_factory.mktemp("many")
    return [
        retrained(packaged, folder / f"{i}.tl", "lin.weight", by=float(i + 1))
        for i in range(WRITERS * EACH)
    ]


@pytest.fixture(params=["folder", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place that several processes can write to."""
    return (
        Place(str(tmp_path / "store"))
        if request.param == "folder"
        else s3_place(request.getfixturevalue("s3"))
    )


@pytest.mark.matrix("folder")
def test_processes_that_write_at_once_lose_nothing(
    many: list[Package], shared: Place, tmp_path: Path
) -> None:
    if shared.kind == "s3":
        many = many[: 2 * WRITERS]  # the server has one thread and is slow
    paths = [package.path for package in many]
    reports = told(
        "together",
        shared.url,
        "main",
        str(WRITERS),
        *paths,
        cwd=tmp_path,
        environment=shared.environment,
    )
    store = shared.store()
    states = store.releases("main")
    assert {state.release.package for state in states} == {package.digest for package in many}
    assert [state.release.name for state in states] == [
        str(number + 1) for number in range(len(many))
    ]
    assert sorted(int(report["release"]) for report in reports) == list(range(1, len(many) + 1))
    assert Counter(state.status for state in states) == {"current": 1, "promoted": len(many) - 1}
    assert len(store.history("main")) == len(many)


def test_of_writers_with_one_condition_one_is_first_and_the_others_are_told(
    many: list[Package], shared: Place
) -> None:
    for package in many[:3]:
        push(package.path, shared.url, line="main", promote=False, options=shared.options)
    stores = [shared.store() for _ in range(3)]
    begin = threading.Barrier(len(stores))

    def promote(number: int) -> bool:
        begin.wait()
        try:
            stores[number].promote("main", number + 1, only_if="none")
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(promote, range(len(stores))))
    assert sum(won) == 1
    (pointer,) = stores[0].history("main")
    assert pointer.release == stores[0].release("main", won.index(True) + 1).id


def test_a_push_that_is_killed_anywhere_shows_a_whole_release_or_none_and_goes_on(
    packaged: Package, tmp_path: Path
) -> None:
    reports = told("killed", tmp_path, packaged.path, cwd=tmp_path)
    assert len(reports) > 15
    assert all(report["killed"] for report in reports)
    assert [report for report in reports if not report["whole"]] == []
    assert [report["after"] for report in reports] == [["current"]] * len(reports)
    assert {report["releases"] for report in reports} == {0, 1}
    for report in reports:
        then = report["then"]
        assert then["sent_files"] == then["files"] - report["blobs"]
        assert then["new"] == (report["releases"] == 0)
    assert {0, reports[0]["then"]["files"]} <= {report["then"]["sent_files"] for report in reports}


@pytest.mark.slow
def test_a_push_to_s3_that_is_killed_shows_nothing_and_goes_on_where_it_stopped(
    many: list[Package], s3: str
) -> None:
    place = s3_place(s3)
    process = writer(place, many[0].path, environment={"DIE_AFTER": "9"})
    started(process)
    process.communicate("go\n", timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert place.store().lines() == ()
    report = push(many[0].path, place.url, options=place.options)
    assert report.sent_files < report.files
    assert report.sent_bytes + report.present_bytes == report.bytes
    assert place.store().release("main").package == many[0].digest


def pull_half(store: str, target: Path) -> None:
    """Pull, and kill the process when half of the data is there."""

    def die(done: int, total: int) -> None:
        if done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)

    pull(store, target, on_progress=die)


def test_a_pull_that_is_killed_leaves_no_package_and_the_next_one_uses_what_it_left(
    packaged: Package, folder: Place, tmp_path: Path
) -> None:
    push(packaged.path, folder.url)
    target = tmp_path / "packages" / "pulled.tl"
    target.parent.mkdir()
    assert ran(pull_half, folder.url, target, cwd=tmp_path)[0] == -signal.SIGKILL
    assert not target.exists()
    report = pull(folder.url, target)
    assert report.local_bytes > 0
    assert verify_package(target).ok
