"""Retraining whose store, data, configuration and runs are at URLs, on several machines."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load
from tests.launch.checkpoint_places import use
from tests.launch.forked import command
from tests.packaging.places import BUCKET, KEYS, s3_server
from tests.retraining.conftest import write_day
from tests.retraining.ticking import LINE, config_of, day, name, tick
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.core.storage.open_files import open_files
from trainload.launching.node.fetching import here
from trainload.launching.run.journal import read_events
from trainload.launching.run.working_copy import state_at, viewed
from trainload.packaging.package import Package
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config
from trainload.retraining.ticks.tick_records import Ended, Evaluated, Ticks, Trained

URL = f"s3://{BUCKET}/retraining"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of an S3 server that this process uses."""
    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        for key, value in {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_MAX_ATTEMPTS": "1"}.items():
            patch.setenv(key, value)
        use(url)
        yield url


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "store": f"{URL}/store",
        "runs": f"{URL}/runs",
        "data": {"files": f"{URL}/data/*.arrow"},
        "train": {"epochs": 2, "optimizer": "kept"},
        "retention": {"runs": 1},
        **changes,
    }


def send_day(number: int, folder: Path, **options: Any) -> None:
    """Write the rows of a day to the URL of the data."""
    path = write_day(folder / "day.arrow", seed=number, **options)
    open_files(f"{URL}/data").replace(f"{number}.arrow", path.read_bytes())


@pytest.fixture(scope="module")
def lived(s3: str, small: Package, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The configuration of a line after three ticks, each on a machine of its own."""
    folder = tmp_path_factory.mktemp("local")
    config = config_of(folder, small, **settings())
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3):
            send_day(number, folder, shift=0.2 * number)
            patch.setenv("TRAINLOAD_CACHE_DIR", str(folder / f"machine-{number}"))
            tick(config, number)
            shutil.rmtree(folder / f"machine-{number}")
    return config


@pytest.fixture
def ticks(lived: Config) -> Ticks:
    return Ticks(Store(lived.store), LINE)


def test_every_tick_is_promoted(ticks: Ticks) -> None:
    assert [ended.outcome for ended in ticks.of_all(Ended).values()] == ["promoted"] * 3


def test_its_runs_evaluated_champion_and_challenger(ticks: Ticks) -> None:
    evaluated = ticks.read_required(Evaluated, name(1))
    assert evaluated.challenger.loss is not None
    assert evaluated.champion.loss is not None
    assert evaluated.challenger.loss < evaluated.champion.loss
    trained = ticks.read_required(Trained, name(1))
    assert trained.run_dir == f"{URL}/runs/{LINE}/{name(1)}/run-1"


def test_old_runs_are_removed(lived: Config) -> None:
    files = open_files(f"{URL}/runs/{LINE}")
    assert list(files.walk(name(0))) == []
    assert files.size(f"{name(2)}/run-1/run.json") is not None


def send_configuration(config: Config, **changes: Any) -> str:
    """Write a configuration with relative places to a URL, and return the URL."""
    keys = {key: value for key, value in config.to_json().items() if value is not None}
    keys |= {"store": "store", "runs": "runs", "data": {"files": "data/*.arrow"}, **changes}
    open_files(URL).replace("retrain.yaml", yaml.safe_dump(keys).encode())
    return f"{URL}/retrain.yaml"


def command_of(url: str, number: int) -> list[str | Path]:
    return ["retrain", "tick", url, "--at", f"{day(number):%Y-%m-%dT%H:%M:%SZ}", "--json"]


def test_a_configuration_at_a_url(lived: Config, capsys: pytest.CaptureFixture[str]) -> None:
    words = command_of(send_configuration(lived), 2)
    assert cli.run([str(word) for word in words]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "promoted"


def has_checkpoint(run: str) -> bool:
    state = state_at(run)
    return state is not None and state.summary.checkpoint is not None


@pytest.mark.slow
def test_a_tick_that_was_killed_is_continued_on_another_machine(
    lived: Config, small: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other")
    train = {"steps": 1200, "checkpoint_every": 200}
    words = command_of(send_configuration(lived, line="killed", train=train), 0)
    run = open_files(f"{URL}/runs/killed/{name(0)}/run-1")
    with command(*words, cwd=tmp_path, TRAINLOAD_CACHE_DIR=other) as first:
        wait_until(lambda: has_checkpoint(run.url))
        first.process.kill()
        first.wait()
    assert cli.run([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    assert f"continuing with {run.url}" in printed.err
    assert json.loads(printed.out)["outcome"] == "promoted"
    with viewed(run.url) as files:
        starts = [each.data["step"] for each in read_events(files.folder) if each.kind == "start"]
    assert starts[0] == 0
    assert starts[1] > 0


def test_the_current_release_is_handed_over_at_a_url(
    lived: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, told = f"{URL}/serving", tmp_path / "told"
    script = f"import sys, pathlib; pathlib.Path({str(told)!r}).write_text(sys.argv[1])"
    handover = {"place": "serving", "command": [sys.executable, "-c", script]}
    url = send_configuration(lived, handover=handover)
    for _ in range(2):
        assert cli.run(["retrain", "handover", url]) == 0
    files, release = open_files(place), Store(lived.store).current(LINE)
    assert release is not None
    name = f"{LINE}-{shown(release.release)}"
    assert files.read("current", 100) == f"{name}\n".encode()
    assert told.read_text() == f"{place}/{name}"
    weights = files.read(f"{name}/model.safetensors", 2**20)
    assert weights is not None
    _, path = here(f"{lived.store}#{LINE}/{shown(release.release)}")
    own = trainload.open(path).weights
    found = load(weights)
    assert all(torch.equal(found[each], own.tensor(each)) for each in own.names())
