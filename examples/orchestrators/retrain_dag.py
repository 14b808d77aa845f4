"""Airflow DAG whose runs are ticks of a retraining; see docs/guides/orchestrators.md.

Copy it into Airflow's folder of DAGs, and set RETRAIN_FILE. A run is one scheduled time, so Airflow
may retry, clear and kill it at any point: the same tick continues where it stopped, and a finished
one does nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.exceptions import AirflowException, AirflowFailException
from airflow.sdk import dag, task

FILE = os.environ.get("RETRAIN_FILE", "/srv/retrain/retrain.yaml")
TRAINLOAD = shlex.split(os.environ.get("TRAINLOAD", "trainload"))
"""The command, such as `/opt/trainload/bin/trainload`: Airflow and trainload need not share an
environment.
"""
WRONG = 2
"""Exit status for a mistake in the file or in the time, which a retry does not fix."""


@dag(  # type: ignore[untyped-decorator]  # Airflow has an environment of its own
    schedule="0 3 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,  # ticks of one line follow each other in the order of their times
    default_args={
        "retries": 3,
        "retry_delay": timedelta(minutes=1),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(hours=1),
    },
)
def retrain() -> None:
    """Retrain the line of FILE once a day."""

    @task  # type: ignore[untyped-decorator]  # as above
    def tick(data_interval_end: datetime | None = None, dag_run: Any = None) -> dict[str, Any]:
        """Run the tick of a scheduled time, and return its outcome, reason and release.

        The time of a run that somebody has triggered is that of the trigger, in whole seconds, also
        when the run is retried.
        """
        scheduled = (data_interval_end or dag_run.run_after).replace(microsecond=0)
        words = ["retrain", "tick", FILE, "--at", scheduled.isoformat(), "--json"]
        done = subprocess.run([*TRAINLOAD, *words], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == WRONG:
            raise AirflowFailException("the file or the time is wrong: see the log")
        if done.returncode != 0:
            raise AirflowException(f"the tick ended with status {done.returncode}: see the log")
        ended: dict[str, Any] = json.loads(done.stdout)
        return {name: ended[name] for name in ("tick", "outcome", "reason", "release")}

    tick()


retrain()
