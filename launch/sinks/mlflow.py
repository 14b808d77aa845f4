"""A sink that logs a run's numbers to MLflow, on the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import math
import os
import re
import time as clock
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.exceptions import MlflowException

from trainload.core.atomic import replace_file
from trainload.core.errors import StorageError, first_line
from trainload.launching.run.working_copy import SINK_FILE
from trainload.launching.sinks.protocol import Outcome
from trainload.launching.sinks.run_parameters import parameters_of

EXPERIMENT = "trainload"
_MAX_PER_REQUEST = 500
"""Number of metrics in one request."""
_MAX_BUFFERED = 100 * _MAX_PER_REQUEST
"""Number of the latest metrics that are buffered while the server is unavailable."""
_SEND_SECONDS = 5.0
"""Time after which fewer metrics than one request may have are sent, too."""
_MAX_NAME = 250
_MAX_PARAMETER = 6000
"""Number of characters of a value."""
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
_BAD_REQUEST = 400
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
        self._sent = clock.monotonic()
        try:
            self._run = self._find_run(run_dir)
            self._log_parameters(run_dir)
        except MlflowException as error:
            raise StorageError(
                "MLflow did not accept the run", where="MLFLOW_TRACKING_URI", got=first_line(error)
            ) from error

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._waiting += [
            Metric(_accepted(name), value, int(time * 1000), step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        is_due = clock.monotonic() - self._sent >= _SEND_SECONDS
        if is_due or len(self._waiting) >= _MAX_PER_REQUEST:
            self._send()

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        self._client.set_tag(self._run, f"last {kind}", message[:5000])

    def close(self, outcome: Outcome, /) -> None:
        try:
            self._send()
        finally:
            self._client.set_terminated(self._run, RunStatus.to_string(_STATUS[outcome]))

    def _find_run(self, run_dir: Path) -> str:
        """Return the id of the run in MLflow, which is created unless an earlier driver did."""
        run_file = run_dir / SINK_FILE
        if run_file.exists():
            run = run_file.read_text().strip()
            self._client.update_run(run, status=RunStatus.to_string(RunStatus.RUNNING))
            return run
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        number = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        run = str(self._client.create_run(number, run_name=run_dir.name).info.run_id)
        replace_file(run_file, f"{run}\n".encode())
        return run

    def _log_parameters(self, run_dir: Path) -> None:
        """Log those parameters that the run does not have: MLflow rejects changes of others."""
        known = self._client.get_run(self._run).data.params
        params = [
            Param(name, str(value)[:_MAX_PARAMETER])
            for name, value in parameters_of(run_dir).items()
            if name not in known
        ]
        if params:
            self._client.log_batch(self._run, params=params)

    def _send(self) -> None:
        self._waiting = self._waiting[-_MAX_BUFFERED:]
        self._sent = clock.monotonic()
        while self._waiting:
            try:
                self._client.log_batch(self._run, metrics=self._waiting[:_MAX_PER_REQUEST])
            except MlflowException as error:
                if error.get_http_status_code() == _BAD_REQUEST:
                    # it would reject them again, and then all that follow would wait
                    del self._waiting[:_MAX_PER_REQUEST]
                raise
            del self._waiting[:_MAX_PER_REQUEST]


def _accepted(name: str) -> str:
    """Return a metric's name with _ for the characters and parts that MLflow does not accept."""
    parts = _NOT_IN_NAMES.sub("_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[-_MAX_NAME:].lstrip("/")
