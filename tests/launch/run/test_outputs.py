"""Paths of outputs may not be inside a package.

Relative paths are relative to the command's working directory.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.tiny import tiny_job

import trainload
from trainload.cli import main as cli
from trainload.core.errors import StorageError
from trainload.packaging.package import Package

JOB = """
import os
from tests.launch.tiny import tiny_job

os.chdir("elsewhere")


def job():
    os.chdir("deeper")
    return tiny_job()
"""


@pytest.fixture
def package(tiny: Package, tmp_path: Path) -> Package:
    """A copy of the tiny package that a test may damage."""
    shutil.copytree(tiny.path, tmp_path / "tiny.tl")
    return trainload.open(tmp_path / "tiny.tl")


def launched(package: Package, data: Path, target: Path) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(package, plan, data, run_dir=target, steps=1, backend="local", compile=False)


def with_result(package: Package, data: Path, target: Path) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    run_dir = package.path.with_name("run")
    trainload.launch(
        package, plan, data, run_dir=run_dir, output=target, steps=1, backend="local", compile=False
    )


def planned(package: Package, data: Path, target: Path) -> None:
    if cli.run(["plan", str(package.path), "-o", str(target)]):
        raise StorageError("inside a package")


def exported(package: Package, data: Path, target: Path) -> None:
    trainload.export(package, target, to="huggingface")


def pushed(package: Package, data: Path, target: Path) -> None:
    trainload.push(package.path, target)


@pytest.mark.matrix("new-launched", "new-with_result", "graphs/new-exported")
@pytest.mark.parametrize("act", [launched, with_result, planned, exported, pushed])
@pytest.mark.parametrize("place", ["new", "graphs/new"])
def test_nothing_is_written_into_a_package(
    package: Package, tiny_data: Path, act: Callable[[Package, Path, Path], None], place: str
) -> None:
    with pytest.raises(StorageError, match="inside a package"):
        act(package, tiny_data, package.path / place)
    assert trainload.open(package.path).digest == package.digest


def test_a_job_file_that_goes_to_another_folder_moves_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "deeper").mkdir(parents=True)
    (tmp_path / "going.py").write_text(JOB)
    (tmp_path / "words.txt").write_text("a b c")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["freeze", "going.py:job", "-o", "out.tl", "--asset", "words=words.txt"]) == 0
    assert trainload.open(tmp_path / "out.tl").asset("words") == b"a b c"


@pytest.mark.slow
def test_threads_freeze_at_the_same_time(tmp_path: Path) -> None:
    # created in this thread: other threads would draw weights from the same generator
    jobs = [tiny_job() for _ in range(3)]
    found: list[Package | BaseException] = []

    def freeze(number: int) -> None:
        try:
            found.append(trainload.freeze(jobs[number], tmp_path / f"{number}.tl"))
        except BaseException as error:  # noqa: BLE001  # the test reports it
            found.append(error)

    threads = [threading.Thread(target=freeze, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digests = {each.digest if isinstance(each, Package) else repr(each) for each in found}
    assert len(found) == 3 and len(digests) == 1
