"""Runs whose records are at a URL, on machines that share no folder."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.checkpoint_places import wire_to
from tests.launch.commands import refused
from tests.launch.forked import command
from tests.launch.run_at_url.local_runs import (
    STEPS,
    arguments,
    has_begun,
    launched,
    losses_at,
    summary_at,
)
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.core.atomic import create_file
from trainload.core.storage.open_files import open_files
from trainload.launching.data.made_data import Data
from trainload.launching.run.driver import driving
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.publication import Publication
from trainload.launching.run.working_copy import viewed, working_copy
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]


def told(capsys: Capture, *arguments: str) -> Any:
    assert cli.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_at_a_url_equals_one_in_a_folder(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str
) -> None:
    launched(tiny, tiny_data, tmp_path / "run")
    result = launched(tiny, tiny_data, url)
    assert losses_at(url) == losses(read_events(tmp_path / "run"))
    assert (result.run_dir, result.checkpoint) == (url, f"{url}/checkpoints/step-00000006")


def test_nothing_of_it_stays_on_the_machine(
    tiny: Package, tiny_data: Path, machine: Path, url: str
) -> None:
    launched(tiny, tiny_data, url)
    assert list((machine / "runs").iterdir()) == []


def test_commands_read_it_from_any_machine(
    tiny: Package, tiny_data: Path, machine: Path, url: str, capsys: Capture, tmp_path: Path
) -> None:
    launched(tiny, tiny_data, url)
    capsys.readouterr()
    status = told(capsys, "status", url)
    assert (status["run"], status["phase"], status["summary"]["step"]) == (url, "ended", STEPS)
    assert [each["run"] for each in told(capsys, "runs", url.rpartition("/")[0])] == [url]
    assert cli.run(["logs", url]) == 0
    assert "checkpoint" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert told(capsys, "report", url, "--output", str(page))["step"] == STEPS
    assert url in page.read_text()


def test_a_killed_run_is_continued_on_another_machine(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, machine: Path
) -> None:
    launched(tiny, tiny_data, tmp_path / "whole", steps=40)
    more = ["--steps", "40", "--checkpoint-every", "2"]
    other = str(tmp_path / "other")
    with command(
        *arguments(tiny, tiny_data, url, *more), cwd=tmp_path, TRAINLOAD_CACHE_DIR=other
    ) as driver:
        wait_until(lambda: (summary_at(url).get("checkpoint") or 0) >= 4)
        driver.process.kill()
        driver.wait()
    result = trainload.resume(url, backend="local")
    assert result.steps == 40
    assert losses_at(url) == losses(read_events(tmp_path / "whole"))


def test_a_run_is_stopped_from_another_machine(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, capsys: Capture, machine: Path
) -> None:
    other = str(tmp_path / "other")
    more = ["--steps", "1000000"]
    with command(
        *arguments(tiny, tiny_data, url, *more), cwd=tmp_path, TRAINLOAD_CACHE_DIR=other
    ) as driver:
        wait_until(lambda: has_begun(url))
        stopped = told(capsys, "stop", url)
        assert driver.wait() == 1
        assert f"Continue with: trainload resume {url}" in driver.err
    assert (stopped["phase"], stopped["run"]) == ("stopped", url)
    assert stopped["checkpoint"] == stopped["step"] > 0
    assert open_files(url).size("stop") is None


def test_a_run_that_somebody_drives_has_no_second_driver(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, capsys: Capture, machine: Path
) -> None:
    other = str(tmp_path / "other")
    more = ["--steps", "1000000"]
    with command(
        *arguments(tiny, tiny_data, url, *more), cwd=tmp_path, TRAINLOAD_CACHE_DIR=other
    ) as driver:
        wait_until(lambda: has_begun(url))
        (tmp_path / "empty").mkdir()
        said = refused(["resume", url, "--backend", "local"], tmp_path / "empty", capsys)
        assert f"{url}: the run is already being driven" in said
        driver.process.terminate()
        driver.wait()


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_driver_whose_clock_is_wrong_is_no_lost_one(
    url: str, machine: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    monkeypatch.setattr("trainload.launching.run.run_state.has_ended", lambda process: None)
    now = time.time
    with working_copy(url) as folder:
        create_file(folder / "run.json", b"{}")
        open_files(url).create("run.json", b"{}")
        with driving(folder, Publication(folder)):
            wait_until(lambda: open_files(url).size("state.json") is not None)
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: now() + ahead)
                assert told(capsys, "status", url)["phase"] == "waiting"


def test_a_url_has_one_run(tiny: Package, tiny_data: Path, url: str) -> None:
    launched(tiny, tiny_data, url)
    with pytest.raises(trainload.StorageError, match=f"a run already exists here.*resume {url}"):
        launched(tiny, tiny_data, url)


def test_rows_of_a_function_are_at_the_url(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, machine: Path
) -> None:
    def rows() -> Any:
        with np.load(tiny_data) as columns:
            return dict(columns)

    launched(tiny, tiny_data, tmp_path / "run")
    launched(tiny, rows, url)
    assert losses_at(url) == losses(read_events(tmp_path / "run"))
    assert open_files(url).size("data/train.arrow") is not None


def test_a_launch_that_fails_leaves_no_run(
    tiny: Package, tiny_data: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no sink")

    monkeypatch.setattr("trainload.launching.api.launch.open_sinks", fail)
    with pytest.raises(ValueError, match="no sink"):
        launched(tiny, tiny_data, url)
    assert open_files(url).names("") == ["driver"]


def test_there_is_no_run_at_a_url(url: str, tmp_path: Path, capsys: Capture) -> None:
    for name in ("status", "logs", "stop", "resume"):
        assert f"{url}: there is no" in refused([name, url], tmp_path, capsys)


def test_a_run_outlives_an_outage_of_its_url(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, s3: str
) -> None:
    launched(tiny, tiny_data, tmp_path / "run", steps=60, checkpoint_every=10)
    with wire_to(s3) as wire:

        def fail(event: Event) -> None:
            if event.kind == "step" and event.data["step"] == 15:
                wire.refuse = True
                wire.cut()
                threading.Thread(target=recover, daemon=True).start()

        def recover() -> None:
            wait_until(lambda: wire.refused > 3)
            wire.refuse = False

        launched(tiny, tiny_data, url, steps=60, checkpoint_every=10, on_event=fail)
    assert losses_at(url) == losses(read_events(tmp_path / "run"))
    assert summary_at(url)["phase"] == "ended"


def test_records_that_cannot_be_published_stay_on_the_machine(
    tiny: Package,
    tiny_data: Path,
    url: str,
    s3: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainload.launching.run.publication.LAST_SECONDS", 0.0)
    with wire_to(s3) as wire:

        def fail(event: Event) -> None:
            if event.kind == "end":
                wire.refuse = True
                wire.cut()

        with pytest.raises(trainload.StorageError, match="were not published") as told:
            launched(tiny, tiny_data, url, on_event=fail)
    folder = Path(told.value.hint.removeprefix("They are in ").partition(",")[0])
    assert cli.run(["logs", str(folder)]) == 0
    assert read_events(folder)[-1].kind == "end"
    with (
        pytest.raises(trainload.StorageError, match=f"a copy of {url}"),
        working_copy(folder),
    ):
        pass


@pytest.mark.slow
def test_a_run_that_was_copied_from_a_folder_is_continued_at_the_url(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, machine: Path
) -> None:
    def stop(event: Event) -> None:
        if event.kind == "checkpoint":
            (tmp_path / "run" / "stop").touch()

    with pytest.raises(trainload.RunInterrupted):
        launched(tiny, tiny_data, tmp_path / "run", steps=1000, checkpoint_every=100, on_event=stop)
    files = open_files(url)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            files.replace(str(path.relative_to(tmp_path / "run")), path.read_bytes())
    before = losses(read_events(tmp_path / "run"))
    assert losses_at(url) == before
    trainload.resume(url, backend="local")
    after = losses_at(url)
    assert after[: len(before)] == before
    assert len(after) == 1000


def test_a_url_of_other_things_is_not_fetched(
    url: str, tmp_path: Path, machine: Path, capsys: Capture
) -> None:
    open_files(url).replace("rows.parquet", bytes(2**20))
    with viewed(url) as run:
        assert not (run.folder / "rows.parquet").exists()


@pytest.mark.parametrize(
    "place",
    ["s3://bucket", "s3://bucket/", "s3://bucket/..", "s3://bucket/a/../b", "s3://bucket/a?b=c"],
)
def test_a_place_that_is_no_folder_is_refused(
    place: str, machine: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert f"{place.rstrip('/')}: a run cannot be there" in refused(
        ["status", place], tmp_path, capsys
    )


def test_a_bucket_that_does_not_exist(
    tiny: Package, tiny_data: Path, s3: str, machine: Path
) -> None:
    with pytest.raises(trainload.StorageError, match=r"NoSuchBucket|does not exist"):
        launched(tiny, tiny_data, f"s3://none-{secrets.token_hex(8)}/run")
    assert list((machine / "runs").iterdir()) == []


def test_its_output_and_the_next_run_s_package_are_at_urls(
    tiny: Package, tiny_data: Path, tmp_path: Path, url: str, machine: Path
) -> None:
    here = launched(tiny, tiny_data, tmp_path / "run", output=tmp_path / "trained.tl")
    place = f"{url}-trained.tl"
    there = launched(tiny, tiny_data, url, output=place)
    assert (there.output, there.output_digest) == (place, here.output_digest)
    trained = trainload.open(place)
    assert trained.source == place
    launched(trainload.open(tmp_path / "trained.tl"), tiny_data, tmp_path / "next")
    launched(trained, tiny_data, f"{url}-next")
    assert losses_at(f"{url}-next") == losses(read_events(tmp_path / "next"))


def test_an_output_at_a_url_is_not_replaced(tiny: Package, tiny_data: Path, url: str) -> None:
    launched(tiny, tiny_data, url, output=f"{url}.tl")
    with pytest.raises(trainload.StorageError, match=r"\.tl: it exists already"):
        launched(tiny, tiny_data, f"{url}-again", output=f"{url}.tl")


def test_a_package_at_a_url_that_changed_is_not_trained(
    tiny: Package, tiny_data: Path, url: str, machine: Path
) -> None:
    launched(tiny, tiny_data, f"{url}-1", output=f"{url}.tl")
    launched(tiny, tiny_data, f"{url}-2", output=f"{url}-other.tl", steps=3)
    package = trainload.open(f"{url}.tl")
    launched(package, tiny_data, url)
    shutil.rmtree(machine)
    files = open_files(f"{url}.tl")
    other = open_files(f"{url}-other.tl").read("manifest.json", 2**24)
    assert other is not None
    files.replace("manifest.json", other)
    with pytest.raises(trainload.IntegrityError, match="not the package that the run was launched"):
        trainload.resume(url, backend="local")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_run_on_ray_survives_its_workers(
    gpt: Package, gpt_data: Path, tmp_path: Path, url: str
) -> None:
    script = Path(__file__).with_name("ray_at_url.py")
    words: list[str | Path] = [sys.executable, "-W", "ignore", script, url]
    words += [gpt.path, gpt_data, "12"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["restarts"] == 1
    assert 2 <= told["starts"][1] < 12
    launched(gpt, gpt_data, tmp_path / "alone", steps=12)
    assert losses_at(url) == pytest.approx(losses(read_events(tmp_path / "alone")), abs=1e-5)


WRITTEN, READ = ("run_dir", "checkpoints", "output"), ("data", "package", "weights_from")
DENIED = ["PUT POST", "GET HEAD", "PUT POST GET HEAD DELETE"]


@pytest.mark.parametrize(
    ("place", "methods"),
    [(place, denied) for place in WRITTEN for denied in DENIED]
    + [(place, denied) for place in READ for denied in DENIED[1:]],
)
def test_a_bucket_without_permission_is_told_before_the_first_step(
    place: str,
    methods: str,
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    url: str,
    s3: str,
    machine: Path,
) -> None:
    files = open_files(url)
    data: Data = tiny_data
    run_dir: str | Path = tmp_path / "run"
    options = dict[str, Any]()
    if place == "run_dir":
        run_dir = url
    elif place == "data":
        files.replace("rows.npz", tiny_data.read_bytes())
        data = f"{url}/rows.npz"
    elif place == "package":
        launched(tiny, tiny_data, tmp_path / "before", output=f"{url}/x.tl")
    elif place == "weights_from":
        files.replace("w.safetensors", next(tiny.path.glob("weights/model-*")).read_bytes())
        options[place] = f"{url}/w.safetensors"
    else:
        options[place] = f"{url}/{place}"

    def begin() -> None:
        package = trainload.open(f"{url}/x.tl") if place == "package" else tiny
        launched(package, data, run_dir, **options)

    with wire_to(s3) as wire:
        wire.denied = frozenset(each.encode() for each in methods.split())
        with pytest.raises(trainload.StorageError, match=r"denied access.*credentials"):
            begin()
    assert not (tmp_path / "run" / "run.json").exists()
    assert files.size("run.json") is None
