"""The sink for MLflow, which logs to a folder, or to a server that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainload
from trainload.launching.run.run_spec import read_spec, replace_spec
from trainload.launching.run.working_copy import SINK_FILE
from trainload.packaging.package import Package

Patch = pytest.MonkeyPatch


@pytest.fixture
def run_dir(tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder of a run without sinks, with MLflow's records beside it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options: dict[str, Any] = {"steps": 1, "compile": False, "backend": "local"}
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    trainload.launch(tiny, plan, tiny_data, run_dir=tmp_path / "run", **options)
    return tmp_path / "run"


def logged(run_dir: Path) -> Any:
    """Return the data of a folder's run in MLflow."""
    from mlflow import MlflowClient

    return MlflowClient().get_run((run_dir / SINK_FILE).read_text().strip()).data


def runs() -> int:
    """Return the number of runs in MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient()
    numbers = [each.experiment_id for each in client.search_experiments()]
    return len(client.search_runs(numbers))


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("metrics/acc@1", "metrics/acc_1"),
        ("metrics/f1(macro)", "metrics/f1_macro_"),
        ("metrics/a//b", "metrics/a/_/b"),
        ("metrics/..", "metrics/_"),
        ("metrics/a/", "metrics/a/_"),
        ("metrics/größe 3:x", "metrics/größe 3:x"),
        (f"statistics/{'layer.' * 60}0/rms", f"{'layer.' * 60}0/rms"[-250:]),
    ],
)
def test_every_name_is_logged(run_dir: Path, name: str, accepted: str) -> None:
    from trainload.launching.sinks.mlflow import Mlflow

    sink = Mlflow(run_dir)
    sink.numbers({"loss": 1.0, name: 2.0}, 1, 1.0)
    sink.close("ended")
    assert logged(run_dir).metrics == {"loss": 1.0, accepted: 2.0}


def test_metrics_that_the_server_rejects_do_not_hold_up_later_ones(
    run_dir: Path, monkeypatch: Patch
) -> None:
    from mlflow.exceptions import MlflowException

    from trainload.launching.sinks import mlflow as sinks

    monkeypatch.setattr(sinks, "_SEND_SECONDS", 0.0)
    monkeypatch.setattr(sinks, "_accepted", lambda name: name)
    sink = sinks.Mlflow(run_dir)
    with pytest.raises(MlflowException, match="acc@1"):
        sink.numbers({"acc@1": 1.0}, 1, 1.0)
    sink.numbers({"loss": 2.0}, 2, 2.0)
    assert logged(run_dir).metrics == {"loss": 2.0}


def test_a_slow_run_is_seen_before_its_end(run_dir: Path, monkeypatch: Patch) -> None:
    from trainload.launching.sinks import mlflow as sinks

    sink = sinks.Mlflow(run_dir)
    sink.numbers({"loss": 3.0}, 1, 1.0)
    assert logged(run_dir).metrics == {}
    monkeypatch.setattr(sinks, "_SEND_SECONDS", 0.0)
    sink.numbers({"loss": 2.0}, 2, 2.0)
    assert logged(run_dir).metrics == {"loss": 2.0}


def test_parameters_that_a_server_did_not_receive_are_logged_later(
    run_dir: Path, monkeypatch: Patch
) -> None:
    from mlflow import MlflowClient

    from trainload.launching.sinks.mlflow import Mlflow

    def die(client: MlflowClient, run_id: str, **_values: Any) -> None:
        raise ConnectionError("the server is gone")

    with monkeypatch.context() as dying:
        dying.setattr(MlflowClient, "log_batch", die)
        with pytest.raises(ConnectionError):
            Mlflow(run_dir)
    Mlflow(run_dir).close("ended")
    assert runs() == 1
    assert logged(run_dir).params["package"] == read_spec(run_dir).digest


def test_a_run_that_is_resumed_with_more_steps_continues_its_run(run_dir: Path) -> None:
    from trainload.launching.sinks.mlflow import Mlflow

    Mlflow(run_dir).close("stopped")
    replace_spec(read_spec(run_dir).model_copy(update={"steps": 9}))
    Mlflow(run_dir).close("ended")
    assert runs() == 1
    assert logged(run_dir).params["steps"] == "1"
