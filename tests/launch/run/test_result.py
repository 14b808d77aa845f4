"""The outputs of a run, including a run that is killed just before its end and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainload
from trainload.core.errors import StorageError
from trainload.launching.run.result import RunResult
from trainload.packaging.package import Package


@pytest.fixture(scope="module")
def done(tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of two steps. Tests must not change it."""
    folder = tmp_path_factory.mktemp("done")
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    return trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=folder / "run",
        output=folder / "out.tl",
        steps=2,
        backend="local",
        compile=False,
    )


def test_a_run_that_was_killed_after_it_wrote_its_result_is_resumed_to_the_same(
    done: RunResult,
) -> None:
    assert isinstance(done.output, Path)
    before = {path: path.stat().st_mtime_ns for path in done.output.rglob("*")}
    again = trainload.resume(done.run_dir, backend="local")
    assert (again.output, again.output_digest) == (done.output, done.output_digest)
    assert {path: path.stat().st_mtime_ns for path in done.output.rglob("*")} == before


def test_nothing_is_left_of_the_comparison(done: RunResult) -> None:
    assert isinstance(done.output, Path)
    trainload.resume(done.run_dir, backend="local")
    assert sorted(path.name for path in done.output.parent.iterdir()) == ["out.tl", "run"]


def test_another_package_in_the_place_of_the_result_is_refused_before_anything_starts(
    tiny: Package, done: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(done.output, Path)
    kept = done.output.rename(done.output.with_name("kept.tl"))
    done.output.symlink_to(tiny.path)
    monkeypatch.setattr(
        "trainload.launching.worker.local_run.run_in_process",
        lambda *_, **__: pytest.fail("it started"),
    )
    try:
        with pytest.raises(StorageError, match="exists already"):
            trainload.resume(done.run_dir, backend="local")
    finally:
        done.output.unlink()
        kept.rename(done.output)


def test_the_result_of_another_run_is_not_taken_for_this_ones(
    tiny: Package, tiny_data: Path, done: RunResult
) -> None:
    assert isinstance(done.output, Path)
    kept = done.output.rename(done.output.with_name("kept.tl"))
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    other = done.output.with_name("other")
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=other,
        output=done.output,
        steps=1,
        backend="local",
        compile=False,
    )
    with pytest.raises(StorageError, match="another file or folder is in its place"):
        trainload.resume(done.run_dir, backend="local")
    done.output.rename(done.output.with_name("others.tl"))
    kept.rename(done.output)
