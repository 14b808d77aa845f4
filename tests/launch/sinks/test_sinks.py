"""The sinks that receive a run's metrics in addition to the journal."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event as Record
from tests.launch.sinks.names_table import PAGE, with_table

import trainload
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.sinks import sink as sinks
from trainload.launching.sinks.protocol import Outcome
from trainload.launching.sinks.sink import numbers_of, open_sinks
from trainload.packaging.package import Package

STEPS = 4


def trained(
    package: Package, data: Path, held_out: Path, run_dir: Path, *names: Any
) -> list[float]:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    options: dict[str, Any] = {
        "steps": STEPS,
        "compile": False,
        "backend": "local",
        "sinks": names,
        "eval_data": held_out,
    }
    trainload.launch(package, plan, data, run_dir=run_dir, **options)
    return losses(read_events(run_dir))


def records(folder: Path) -> Iterator[Record]:
    """Yield the records of TensorBoard's files, which are framed by a length and two checksums."""
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Record.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_has_the_losses_of_the_journal(
    gpt: Package, gpt_data: Path, gpt_held_out: Path, tmp_path: Path
) -> None:
    expected = trained(gpt, gpt_data, gpt_held_out, tmp_path / "run", "tensorboard")
    found: dict[str, dict[int, float]] = {}
    for record in records(tmp_path / "run" / "tensorboard"):
        for value in record.summary.value:
            found.setdefault(value.tag, {})[record.step] = value.simple_value
    assert [found["loss"][step] for step in range(1, STEPS + 1)] == pytest.approx(expected)
    assert {
        "gradient_norm",
        "metrics/accuracy",
        "evaluation/loss",
        "tokens_per_second",
        "checkpoint/bytes",
    } <= set(found)
    assert sorted(found["evaluation/loss"]) == [0, STEPS]


def test_tensorboard_has_numbers_that_are_not_finite_without_a_line_for_each(
    tmp_path: Path,
) -> None:
    code = f"""
from pathlib import Path
from trainload.launching.sinks.tensorboard import TensorBoard
sink = TensorBoard(Path({str(tmp_path)!r}))
sink.numbers({{"loss": float("nan")}}, 1, 1.0)
sink.numbers({{"loss": float("-inf")}}, 2, 2.0)
sink.close("failed")
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout + process.stderr == ""
    values = [
        value.simple_value
        for record in records(tmp_path / "tensorboard")
        for value in record.summary.value
    ]
    assert (str(values[0]), values[1]) == ("nan", float("-inf"))


def test_mlflow_has_the_losses_of_the_journal_and_what_was_run(
    tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the import takes seconds: no other test of this process waits for it
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    expected = trained(tiny, tiny_data, tiny_data, tmp_path / "run", "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("trainload")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = {
        metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")
    }
    assert [history[step] for step in range(1, STEPS + 1)] == pytest.approx(expected)
    assert (run.info.run_name, run.info.status, run.data.params["package"]) == (
        "run",
        "FINISHED",
        tiny.digest,
    )


class Refusing:
    """Fake sink that fails while its server is away."""

    def __init__(self) -> None:
        self.away = True
        self.taken: list[int] = []
        self.outcome = ""

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        if self.away:
            raise ConnectionError("nobody answers")
        self.taken.append(step)

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        raise AssertionError("there was none")

    def close(self, outcome: Outcome, /) -> None:
        self.taken.append(-1)
        self.outcome = outcome


def step(number: int) -> Event:
    return Event(
        "step",
        {"step": number, "loss": 1.0, "gradient_norm": 1.0, "seconds": 0.1, "metrics": {}},
        1.0,
    )


def test_a_server_that_is_away_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, heard = Refusing(), list[Event]()
    monkeypatch.setattr(sinks, "_open_sink", lambda name, run_dir: server)
    with open_sinks(["mlflow"], tmp_path, heard.append) as tell:
        tell(step(0))
        tell(step(1))
        while len(heard) < 3:
            pass
        server.away = False
        tell(step(2))
    assert server.taken == [3, -1]
    warnings = [event.data["message"] for event in heard if event.kind == "warning"]
    assert warnings == ["mlflow did not accept the run's metrics: nobody answers"]


@pytest.mark.parametrize(
    ("last", "outcome"),
    [("end", "ended"), ("stopped", "stopped"), ("failed", "failed"), (None, "failed")],
)
def test_a_sink_is_told_what_became_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str | None, outcome: Outcome
) -> None:
    server = Refusing()
    server.away = False
    monkeypatch.setattr(sinks, "_open_sink", lambda name, run_dir: server)
    with open_sinks(["mlflow"], tmp_path, lambda _: None) as tell:
        tell(step(0))
        if last is not None:
            tell(Event(last, {"step": 1, "steps": 1}, 2.0))
    assert server.outcome == outcome


def test_mlflow_has_a_failed_run_as_failed_and_keeps_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.entities import Metric

    from trainload.launching.sinks import mlflow

    statuses: list[str] = []
    sent: list[Metric] = []

    class Client:
        away = True

        def log_batch(self, run: str, metrics: list[Metric]) -> None:
            if self.away:
                raise ConnectionError("nobody answers")
            sent.extend(metrics)

        def set_terminated(self, run: str, status: str) -> None:
            statuses.append(status)

    sink = mlflow.Mlflow.__new__(mlflow.Mlflow)
    client = Client()
    sink._client, sink._run, sink._waiting, sink._sent = client, "run", [], time.monotonic()
    monkeypatch.setattr(mlflow, "_MAX_BUFFERED", 1200)
    for number in range(3000):
        with contextlib.suppress(ConnectionError):
            sink.numbers({"loss": 1.0}, number, 1.0)
    assert len(sink._waiting) <= 1200
    client.away = False
    sink.close("failed")
    assert [metric.step for metric in sent] == list(range(1800, 3000))
    assert statuses == ["FAILED"]


def test_a_library_that_is_not_there_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.delitem(sys.modules, "trainload.launching.sinks.tensorboard", raising=False)
    line = r"tensorboard is not installed.*pip install 'trainload\[tensorboard\]'"
    with (
        pytest.raises(trainload.StorageError, match=line),
        open_sinks(["tensorboard"], tmp_path, lambda event: None),
    ):
        pass


def test_every_number_has_one_name() -> None:
    found = numbers_of(
        Event("step", {**step(0).data, "metrics": {"accuracy": 0.5}, "tokens_per_second": 9.0}, 1.0)
    )
    assert set(found) == {
        "loss",
        "gradient_norm",
        "seconds",
        "metrics/accuracy",
        "tokens_per_second",
    }


def test_the_page_has_the_names_of_all_metrics() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python -m tests.launch.sinks.names_table"


def test_a_launch_whose_sink_does_not_respond_leaves_nothing(
    tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, run_dir: Path) -> None:
        raise trainload.StorageError("MLflow did not accept the run")

    monkeypatch.setattr(sinks, "_open_sink", refuse)
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    with pytest.raises(trainload.StorageError, match="MLflow"):
        trainload.launch(
            tiny,
            plan,
            tiny_data,
            run_dir=tmp_path / "runs" / "one",
            backend="local",
            sinks=("tensorboard",),
        )
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_names_sinks(tiny: Package, tiny_data: Path, tmp_path: Path) -> None:
    from trainload.cli import main as cli

    options = [
        "--run-dir",
        tmp_path / "run",
        "--steps",
        "2",
        "--backend",
        "local",
        "--no-compile",
        "--set",
        "sinks=tensorboard",
    ]
    assert (
        cli.run([str(part) for part in ("launch", tiny.path, "--data", tiny_data, *options)]) == 0
    )
    assert read_spec(tmp_path / "run").sinks == ("tensorboard",)
