"""A tick on a fresh machine compiles nothing if the builds for it are in its store, here in S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from tests.packaging.places import BUCKET, KEYS, s3_server
from tests.packaging.signers import Signers
from tests.retraining.conftest import classifier, write_day
from tests.retraining.ticking import LINE, config_of, day
from tests.shared import frozen_once

import trainload
from trainload.core.errors import RequestError
from trainload.launching.node import build as building
from trainload.launching.run.journal import Event, read_events
from trainload.packaging.package import Package
from trainload.packaging.stores.stored_builds import BuildPushReport
from trainload.retraining.config.config import Config
from trainload.retraining.retraining_builds import push_builds
from trainload.retraining.ticks.tick import Scheduler
from trainload.retraining.ticks.tick_records import Ended
from trainload.retraining.ticks.tick_stages import Opening, Stages

pytestmark = pytest.mark.slow
STORE = f"s3://{BUCKET}/retraining"


def silent(_text: str) -> None:
    """Print nothing."""


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    """An S3 server that this module's processes use."""
    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        # fsspec gives out clients again that it has made for other endpoints
        s3fs.S3FileSystem.clear_instance_cache()
        yield
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen_once(tmp_path_factory, "small", classifier)


@pytest.fixture(scope="module")
def config(s3: None, small: Package, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A retraining whose line has its first release in S3."""
    folder = tmp_path_factory.mktemp("retraining")
    write_day(folder / "data" / "0.arrow", rows=60)
    trainload.push(small.path, STORE, line=LINE)
    return config_of(folder, small, store=STORE, cluster={"backend": "local"})


@pytest.fixture(scope="module")
def pushed(config: Config, signers: Signers) -> list[BuildPushReport]:
    return push_builds(config, Stages(Opening(), silent).open, signers.alice.key)


def test_training_and_evaluation_share_a_build(pushed: list[BuildPushReport]) -> None:
    assert [each.verified for each in pushed] == [True]


@pytest.fixture(scope="module")
def made(
    config: Config,
    pushed: list[BuildPushReport],
    signers: Signers,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Ended, list[str]]:
    """A tick with an empty cache, and the graphs that it has derived or compiled."""
    folder = tmp_path_factory.mktemp("fresh")
    policy = folder / "policy.toml"
    policy.write_text(f'build_makers = ["{signers.alice.public}"]\n')
    made: list[str] = []

    def noted(name: str) -> Any:
        own = getattr(building, name)

        def note(*args: Any, **options: Any) -> Any:
            made.append(name)
            return own(*args, **options)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINLOAD_CACHE_DIR", str(folder / "cache"))
        for name in ("step_graphs", "compile_graph"):
            patch.setattr(building, name, noted(name))
        stages = Stages(Opening(policy=policy), silent)
        ended = Scheduler(config, stages, silent).tick(day(0))
    return ended, made


def test_a_tick_with_an_empty_cache_trains(made: tuple[Ended, list[str]]) -> None:
    assert made[0].outcome == "promoted"


def test_it_derives_and_compiles_nothing(made: tuple[Ended, list[str]]) -> None:
    assert made[1] == []


def events_of(config: Config, kind: str) -> list[Event]:
    """Return the events of a kind in the journal of the tick's run."""
    (run,) = Path(config.runs).glob("*/*/run-1")
    return [event for event in read_events(run) if event.kind == kind]


def test_it_runs_compiled_graphs(made: tuple[Ended, list[str]], config: Config) -> None:
    assert [start.data["compiled"] for start in events_of(config, "start")] == [True]


def test_the_journal_names_the_source_of_the_build(
    made: tuple[Ended, list[str]], config: Config
) -> None:
    assert [build.data["source"] for build in events_of(config, "build")] == ["the store"]


def test_a_line_without_a_release_has_no_builds(
    config: Config, small: Package, signers: Signers
) -> None:
    other = config.model_copy(update={"line": "other"})
    with pytest.raises(RequestError, match="no current release"):
        push_builds(other, Stages(Opening(), silent).open, signers.alice.key)
