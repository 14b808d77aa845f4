"""A sink that logs a run's numbers to MLflow, on the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.exceptions import MlflowException

from trainload.core.errors import StorageError, first_line
from trainload.launching.run.working_copy import SINK_FILE
from trainload.launching.sinks.protocol import Outcome
from trainload.launching.sinks.run_parameters import parameters_of

EXPERIMENT = "trainload"
_MAX_PER_REQUEST = 500
"""Number of metrics in one request."""
_MAX_BUFFERED = 100 * _MAX_PER_REQUEST
"""Number of the latest metrics that are buffered while the server is unavailable."""
_STATUS: Mapping[Outcome, int] = {
    "ended": RunStatus.FINISHED,
    "stopped": RunStatus.KILLED,
    "failed": RunStatus.FAILED,
}


class Mlflow:
    """A `Sink` for MLflow.

    The experiment is MLFLOW_EXPERIMENT_NAME, or "trainload". A resumed run continues the same
    MLflow run.
    """

    def __init__(self, run_dir: Path) -> None:
        # standard output belongs to the command, whose --json is read by programs
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self._client = MlflowClient()
        self._waiting: list[Metric] = []
        run_file = run_dir / SINK_FILE
        try:
            if run_file.exists():
                self._run = run_file.read_text().strip()
                self._client.update_run(self._run, status=RunStatus.to_string(RunStatus.RUNNING))
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            experiment = self._client.get_experiment_by_name(name)
            number = (
                self._client.create_experiment(name)
                if experiment is None
                else experiment.experiment_id
            )
            self._run = self._client.create_run(number, run_name=run_dir.name).info.run_id
            run_file.write_text(self._run + "\n")
            self._client.log_batch(
                self._run,
                params=[Param(name, str(value)) for name, value in parameters_of(run_dir).items()],
            )
        except MlflowException as error:
            raise StorageError(
                "MLflow did not accept the run", where="MLFLOW_TRACKING_URI", got=first_line(error)
            ) from error

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._waiting += [
            Metric(name, value, int(time * 1000), step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        if len(self._waiting) >= _MAX_PER_REQUEST:
            self._send()

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        self._client.set_tag(self._run, f"last {kind}", message[:5000])

    def close(self, outcome: Outcome, /) -> None:
        try:
            self._send()
        finally:
            self._client.set_terminated(self._run, RunStatus.to_string(_STATUS[outcome]))

    def _send(self) -> None:
        self._waiting = self._waiting[-_MAX_BUFFERED:]
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:_MAX_PER_REQUEST])
            del self._waiting[:_MAX_PER_REQUEST]
