"""Artifacts that an earlier version wrote are read, resumed, promoted and rolled back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.golden.artifacts import LINE, PLANS, QUERIES, STEPS, keys_of, restore, versions
from tests.packaging.places import Place, s3_place, s3_server

import trainload
from trainload.cli import main as cli
from trainload.launching.run.journal import losses, read_events

STORE = "retraining/store"
CONFIG = "retraining/retrain.yaml"


@pytest.fixture(scope="session", params=versions(), ids=lambda version: version.name)
def read_only(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a version.

    No test changes them, but a command may write its output next to them.
    """
    return restore(request.param, tmp_path_factory.mktemp("artifacts") / "restored")


@pytest.fixture(params=versions(), ids=lambda version: version.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Artifacts of a version, as the working directory. A test may change them."""
    restored = restore(request.param, tmp_path / "restored")
    monkeypatch.chdir(restored)
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(restored / "cache"))
    return restored


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command with --json, check that it succeeds, and return its output."""
    assert cli.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expected(folder: Path, name: str) -> Any:
    return json.loads((folder / "expected.json").read_text())[name]


def outcomes(history: Any) -> list[str]:
    """Return the outcome of each tick, in order."""
    return [entry["what"] for entry in history["history"] if entry["tick"] is not None]


@pytest.mark.parametrize("name", PLANS)
def test_ranks_of_a_plan_meet(
    name: str, read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_only / "plans" / f"{name}.json"
    assert cli.run(["simulate", str(read_only / "package.tl"), "--plan", str(plan)]) == 0
    assert capsys.readouterr().out


def test_a_stopped_run_is_resumed_with_the_losses_of_one_that_was_not_stopped(folder: Path) -> None:
    run_dir = folder / "runs" / "stopped"
    trainload.resume(run_dir, backend="local")
    assert losses(read_events(run_dir)) == pytest.approx(expected(folder, "losses"), rel=2e-5)


def test_an_ended_run_is_trained_further(folder: Path) -> None:
    run_dir = folder / "runs" / "ended"
    (folder / "trained.tl").rename(folder / "earlier.tl")
    result = trainload.resume(run_dir, steps=STEPS + 2, backend="local")
    assert result.steps == STEPS + 2
    found = losses(read_events(run_dir))
    assert found[:STEPS] == expected(folder, "losses")
    assert found[-1] < found[0]


def test_the_trained_package_has_the_digest_that_the_run_wrote(read_only: Path) -> None:
    assert trainload.open(read_only / "trained.tl").digest == expected(read_only, "digest")
    assert trainload.verify(read_only / "trained.tl").ok


def test_data_is_taken_from_the_cache(folder: Path) -> None:
    before = sorted(path.name for path in (folder / "cache" / "data").iterdir() if path.is_dir())
    trainload.resume(folder / "runs" / "stopped", backend="local")
    assert (
        sorted(path.name for path in (folder / "cache" / "data").iterdir() if path.is_dir())
        == before
    )


@pytest.mark.parametrize("release", ["1", "2", "3"])
def test_a_release_is_pulled_whole(release: str, folder: Path) -> None:
    trainload.pull(f"{folder / STORE}#{LINE}/{release}", folder / "pulled.tl")
    assert trainload.verify(folder / "pulled.tl").ok


def test_a_release_is_rolled_back_and_promoted_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def current() -> str:
        states = printed(capsys, "releases", STORE)["lines"][LINE]
        return str(next(each["release"] for each in states if each["status"] == "current"))

    at_first = current()
    printed(capsys, "rollback", STORE, "--reason", "worse at night")
    rolled_back = current()
    printed(capsys, "promote", STORE, "2", "--rejected", "--reason", "better after all")
    assert (at_first, rolled_back, current()) == ("2", "1", "2")


def test_a_rejected_release_is_not_promoted(folder: Path) -> None:
    with pytest.raises(trainload.StorageError, match="the release was rejected"):
        trainload.promote(folder / STORE, 3, line=LINE)


def test_a_tick_that_was_killed_is_continued_from_its_last_record(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = outcomes(printed(capsys, "history", STORE))
    assert cli.run(["retrain", "tick", CONFIG, "--at", "2026-01-04T00:00:00Z"]) == 0
    capsys.readouterr()
    after = printed(capsys, "history", STORE)
    assert before == ["promoted", "no data", "rejected", "under way"]
    assert outcomes(after) == ["promoted", "no data", "rejected", "promoted"]
    # it was not trained again
    assert (
        len(list((folder / "retraining" / "runs" / LINE / "20260104T000000Z").glob("run-?"))) == 1
    )


def test_another_tick_follows_those_of_the_store(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["retrain", "tick", CONFIG, "--at", "2026-01-05T00:00:00Z"]) == 0
    capsys.readouterr()
    assert outcomes(printed(capsys, "history", STORE)) == [
        "promoted",
        "no data",
        "rejected",
        "promoted",
        "no data",
    ]


@pytest.mark.parametrize("name", QUERIES)
def test_json_output_keeps_its_keys(
    name: str, read_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(read_only)
    was = documents(json.loads((read_only / "outputs.json").read_text())[name])
    cli.run([*QUERIES[name], "--json"])
    now = documents(capsys.readouterr().out)
    kept = set(keys_of(was)) - set(keys_of(now))
    assert was and kept == set()


def test_they_name_no_file_of_the_machine_that_made_them() -> None:
    """They contain no absolute path: the paths of their folder are stored as FOLDER."""
    absolute = re.compile(rb"[\"\s=(']/[A-Za-z]{2,}/")
    assert [
        path
        for version in versions()
        for path in version.rglob("*")
        if path.is_file() and absolute.search(path.read_bytes())
    ] == []


def documents(text: str) -> Sequence[Any]:
    """Parse a JSON document, or one per line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="session")
def s3_store(read_only: Path) -> Any:
    """The store of the artifacts, as objects in S3."""
    with s3_server() as server:
        place = s3_place(server)
        place_objects(read_only / STORE, place)
        yield place


def place_objects(store: Path, place: Place) -> None:
    import s3fs

    files = s3fs.S3FileSystem(**place.options, skip_instance_cache=True)
    for path in store.rglob("*"):
        if path.is_file():
            files.pipe_file(
                f"{place.url.removeprefix('s3://')}/{path.relative_to(store).as_posix()}",
                path.read_bytes(),
            )


@pytest.mark.parametrize("release", ["1", "2"])
def test_a_release_is_pulled_from_s3(
    release: str, s3_store: Place, read_only: Path, tmp_path: Path
) -> None:
    trainload.pull(
        f"{s3_store.url}#{LINE}/{release}", tmp_path / "pulled.tl", options=s3_store.options
    )
    trainload.pull(f"{read_only / STORE}#{LINE}/{release}", tmp_path / "same.tl")
    assert (
        trainload.open(tmp_path / "pulled.tl").digest == trainload.open(tmp_path / "same.tl").digest
    )
