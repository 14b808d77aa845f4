"""The current release of a line in MLflow's model registry, in a folder.

tests/integrations/mlflow/ has the same with a server.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.retraining.conftest import write_day
from tests.retraining.ticking import LINE, config_of, tick
from tests.retraining.ticks.hook_server import hook_server
from tests.retraining.ticks.registered import registered

from trainload.core.errors import StorageError
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Mlflow, checked
from trainload.retraining.ticks.checks import check_config
from trainload.retraining.ticks.lineage import rollback
from trainload.retraining.ticks.model_registry import register_current

Patch = pytest.MonkeyPatch


@pytest.fixture
def mlflow_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_the_current_release_is_a_version_with_its_lineage(
    mlflow_folder: None, store: Store
) -> None:
    assert register_current(Mlflow(), store, LINE) == "1"
    found, current = registered(LINE), store.current(LINE)
    assert current is not None
    release = store.release(LINE)
    tags = {name.removeprefix("trainload."): value for name, value in found.tags["1"].items()}
    assert tags["release"] == f"{store.url}#{LINE}/{release.name}"
    assert (tags["package"], tags["parent"]) == (current.package, "2")
    assert (tags["tick"], tags["rows"]) == ("20260103T000000Z", str(release.facts["rows"]))
    assert tags["data"] == f"{release.facts['rows']} rows of 1 files"
    assert len(tags["data.sha256"]) == 64


def test_registering_again_changes_nothing(mlflow_folder: None, store: Store) -> None:
    for _ in range(3):
        assert register_current(Mlflow(), store, LINE) == "1"
    assert registered(LINE).releases == {"1": "3"}


def test_a_rollback_moves_the_alias_and_a_promotion_moves_it_back(
    mlflow_folder: None, store: Store
) -> None:
    register_current(Mlflow(), store, LINE)
    rollback(store, LINE)
    assert register_current(Mlflow(), store, LINE) == "2"
    assert registered(LINE).champion == "2"
    store.promote(LINE, "3", rejected=True)
    assert register_current(Mlflow(), store, LINE) == "1"
    assert registered(LINE).releases == {"1": "3", "2": "2"}


def test_the_file_names_model_and_alias(mlflow_folder: None, store: Store) -> None:
    register_current(Mlflow(model="our model", alias="live"), store, LINE)
    assert registered("our model", "live").releases == {"1": "3"}


def test_ticks_register_what_they_promote_and_notify_of_it(
    mlflow_folder: None, folder: Path, small: Package
) -> None:
    with hook_server() as hook:
        config = config_of(
            folder,
            small,
            mlflow={"model": "nightly"},
            webhooks=[{"url": hook.url, "events": ["promoted", "no data"]}],
            train={"epochs": 2, "set": {"sinks": ["mlflow"]}},
        )
        first = tick(config, 0)
        assert tick(config, 1).outcome == "no data"
        write_day(folder / "data" / "2.arrow", rows=120, seed=2, shift=0.6)
        assert tick(config, 2).outcome == "promoted"
    assert (first.outcome, first.warnings) == ("promoted", ())
    found = registered("nightly")
    assert (found.releases, found.champion) == ({"1": "2", "2": "3"}, "2")
    assert all(found.run_ids.values())
    assert hook.types == ["promoted", "no data", "promoted"]
    assert hook.messages[0]["data"]["release"] == "2"


def test_a_server_that_hangs_is_given_up(store: Store, monkeypatch: Patch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(StorageError, match="MLflow does not respond"):
            register_current(Mlflow(timeout=timedelta(seconds=1)), store, LINE)


def test_a_tick_trains_and_promotes_without_a_server_of_its_sink_and_its_registry(
    folder: Path, small: Package, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    train = {"epochs": 2, "set": {"sinks": ["mlflow"]}}
    ended = tick(config_of(folder, small, mlflow={}, train=train), 0, said)
    assert ended.outcome == "promoted"
    (warning,) = ended.warnings
    assert "MLflow did not register the release" in warning
    assert any("MLflow did not accept the run" in text for text in said)


def test_a_server_that_is_gone_is_a_storage_error(store: Store, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(StorageError, match="MLflow did not register the release"):
        register_current(Mlflow(), store, LINE)


def test_a_server_that_is_not_mlflows_is_a_storage_error(store: Store, monkeypatch: Patch) -> None:
    with hook_server(lambda number: 200, body=b"{}") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        with pytest.raises(StorageError, match="MLflow did not register the release"):
            register_current(Mlflow(), store, LINE)


@pytest.mark.parametrize(
    ("name", "value"), [("HOOK_URL", "file:///etc/hostname"), ("HOOK_SECRET", "whsec_?")]
)
def test_a_webhook_that_could_not_be_notified_is_named_by_the_check(
    folder: Path, small: Package, monkeypatch: Patch, name: str, value: str
) -> None:
    for each, usual in {
        "HOOK_URL": "https://hooks.example.org/a1",
        "HOOK_SECRET": "sesame",
    }.items():
        monkeypatch.setenv(each, value if each == name else usual)
    hook = {"url": "${env:HOOK_URL}", "secret": "${env:HOOK_SECRET}"}
    config = checked({**config_of(folder, small).to_json(), "webhooks": [hook]}, "the test")
    with pytest.raises(StorageError, match="webhook"):
        check_config(config)


def test_a_webhook_whose_secret_is_not_set_is_named_by_the_check(
    folder: Path, small: Package
) -> None:
    hook = {"url": "https://example.org", "secret": "${env:TEST_UNSET_SECRET}"}
    config = checked({**config_of(folder, small).to_json(), "webhooks": [hook]}, "the test")
    with pytest.raises(StorageError, match="TEST_UNSET_SECRET"):
        check_config(config)
