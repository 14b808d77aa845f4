"""Runs and releases at a real MLflow server, which also dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integrations.mlflow.conftest import Server
from tests.launch.sinks.test_failing_sinks import trained
from tests.retraining.conftest import write_day
from tests.retraining.ticking import LINE, config_of, tick
from tests.retraining.ticks.registered import registered

import trainload
from trainload.launching.run.journal import Event, losses, read_events
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.ticks.announcements import announce
from trainload.retraining.ticks.lineage import rollback

pytestmark = pytest.mark.slow


def train(package: Package, data: Path, run_dir: Path, act: Callable[[Event], None]) -> None:
    """Train four steps with a sink for the server, and call `act` with each event."""
    trainload.launch(
        package,
        trainload.plan(package, trainload.Cluster(), "single"),
        data,
        run_dir=run_dir,
        steps=4,
        compile=False,
        backend="local",
        sinks=["mlflow"],
        on_event=act,
    )


def test_a_server_has_the_losses_of_a_run(
    server: Server, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    found, _, warnings = trained(tiny, tiny_data, tmp_path / "run", "mlflow")
    assert warnings == []
    client = MlflowClient()
    run = (tmp_path / "run" / "mlflow-run").read_text().strip()
    history = {each.step: each.value for each in client.get_metric_history(run, "loss")}
    assert history == pytest.approx(dict(enumerate(found, 1)))
    assert client.get_run(run).info.status == "FINISHED"


def test_a_server_that_dies_changes_nothing_in_a_run(
    server: Server, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    expected, _, _ = trained(tiny, tiny_data, tmp_path / "undisturbed")
    heard: list[Event] = []

    def die(event: Event) -> None:
        heard.append(event)
        if event.kind == "step" and event.data["step"] == 0:
            server.kill()

    train(tiny, tiny_data, tmp_path / "run", die)
    assert losses(read_events(tmp_path / "run")) == expected
    (warning,) = [event.data["message"] for event in heard if event.kind == "warning"]
    assert "mlflow did not accept the run's metrics" in warning


def test_a_server_that_dies_and_returns_has_all_losses_of_one_run(
    server: Server, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    def interfere(event: Event) -> None:
        if event.kind == "step" and event.data["step"] == 0:
            server.kill()
        elif event.kind == "step" and event.data["step"] == 2:
            server.start()

    train(tiny, tiny_data, tmp_path / "run", interfere)
    client = MlflowClient()
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    history = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "loss")}
    found = losses(read_events(tmp_path / "run"))
    assert history == pytest.approx(dict(enumerate(found, 1)))
    assert (run.info.status, run.data.params["package"]) == ("FINISHED", tiny.digest)


def test_a_resumed_run_continues_its_run_at_the_server(
    server: Server, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    trained(tiny, tiny_data, tmp_path / "run", "mlflow")
    trainload.resume(tmp_path / "run", steps=6)
    client = MlflowClient()
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [each.step for each in history] == [1, 2, 3, 4, 5, 6]


def test_ticks_register_their_releases_and_a_rollback_moves_the_alias(
    server: Server, folder: Path, small: Package
) -> None:
    train = {"epochs": 2, "set": {"sinks": ["mlflow"]}}
    config = config_of(folder, small, mlflow={}, train=train)
    assert tick(config, 0).warnings == ()
    assert tick(config, 1).outcome == "no data"
    write_day(folder / "data" / "2.arrow", rows=120, seed=2, shift=0.6)
    assert not [text for text in tick(config, 2).warnings if "MLflow" in text]
    found = registered(LINE)
    assert (found.releases, found.champion) == ({"1": "2", "2": "3"}, "2")
    assert all(found.run_ids.values())
    store = Store(config.store)
    pointer = rollback(store, LINE)
    for _ in range(2):
        assert announce(config, store, pointer=pointer) == ()
    back = registered(LINE)
    assert (back.releases, back.champion) == (found.releases, "1")
    tags = back.tags["1"]
    assert tags["trainload.package"] == pointer.package
    assert (tags["trainload.parent"], tags["trainload.tick"]) == ("1", "20260101T000000Z")


def test_a_server_that_is_gone_is_a_warning_of_the_tick(
    server: Server, folder: Path, small: Package
) -> None:
    server.kill()
    ended = tick(config_of(folder, small, mlflow={"timeout": "20s"}), 0)
    assert ended.outcome == "promoted"
    (warning,) = ended.warnings
    assert "MLflow" in warning
