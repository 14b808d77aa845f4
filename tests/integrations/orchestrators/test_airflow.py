"""The DAG of examples/ is one for Airflow, and its task retrains.

Airflow has an environment of its own, since its requirements exclude others: make integrations.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.house.source import ROOT
from tests.integrations.orchestrators.lines import write_line

PYTHON = Path(os.environ.get("AIRFLOW_PYTHON", ROOT / ".airflow" / "bin" / "python"))
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"there is no Airflow at {PYTHON}: make integrations"
)
DAG = ROOT / "examples" / "orchestrators" / "retrain_dag.py"
_PARSE = """
import json, sys
from datetime import datetime
from airflow.dag_processing.dagbag import DagBag
from airflow.exceptions import AirflowException, AirflowFailException
from airflow.sdk.api.datamodels._generated import DagRun

bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
dag = bag.dags["retrain"]
task = dag.get_task("tick")
results = []
for time in sys.argv[2:]:
    moment = datetime.fromisoformat(time)
    # Airflow has no interval for a run that was triggered without a logical date
    context = (
        {"data_interval_end": None, "dag_run": DagRun.model_construct(run_after=moment)}
        if moment.microsecond
        else {"data_interval_end": moment}
    )
    try:
        results.append(task.python_callable(**context))
    except AirflowFailException:
        results.append("failed, without a retry")
    except AirflowException:
        results.append("failed")
print(json.dumps({
    "retries": task.retries,
    "runs": dag.max_active_runs,
    "catchup": dag.catchup,
    "results": results,
}))
"""
TIME = "2026-01-02T03:00:00+00:00"


def environment(folder: Path, command: str = f"{sys.executable} -m trainload") -> dict[str, str]:
    """Return the environment of Airflow, whose task has the retraining of a folder."""
    return {
        **os.environ,
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "RETRAIN_FILE": str(folder / "retrain.yaml"),
        "TRAINLOAD": command,
    }


def parsed(folder: Path, *times: str, command: str = f"{sys.executable} -m trainload") -> Any:
    """Parse the DAG in Airflow's environment, and call its task for some times."""
    done = subprocess.run(
        [str(PYTHON), "-c", _PARSE, str(DAG), *times],
        env=environment(folder, command),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_airflow_parses_it(tmp_path: Path) -> None:
    dag = parsed(tmp_path)
    assert (dag["retries"], dag["runs"], dag["catchup"]) == (3, 1, False)


def test_its_task_runs_a_tick_and_a_retry_reports_the_same(tmp_path: Path) -> None:
    write_line(tmp_path)
    first, second = parsed(tmp_path, TIME, TIME)["results"]
    assert first["outcome"] == "promoted"
    assert second == first


def test_a_run_that_was_triggered_is_the_tick_of_that_second_however_often_it_is_retried(
    tmp_path: Path,
) -> None:
    write_line(tmp_path)
    time = TIME.replace("00+", "00.123456+")
    first, second = parsed(tmp_path, time, time)["results"]
    assert first["tick"] == second["tick"] == "20260102T030000Z"
    assert first["outcome"] == second["outcome"] == "promoted"


@pytest.mark.slow
def test_airflow_runs_a_tick_for_somebody_who_triggers_it(tmp_path: Path) -> None:
    write_line(tmp_path)
    (tmp_path / "airflow" / "dags").mkdir(parents=True)
    shutil.copy(DAG, tmp_path / "airflow" / "dags")
    for words in ("db migrate", "dags reserialize", "dags test retrain"):
        done = subprocess.run(
            [str(PYTHON), "-m", "airflow", *words.split()],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "'outcome': 'promoted'" in done.stdout
    assert "new_state=success" in done.stdout


def test_a_mistake_in_the_file_is_not_retried(tmp_path: Path) -> None:
    (tmp_path / "retrain.yaml").write_text("line: small\n")
    assert parsed(tmp_path, TIME)["results"] == ["failed, without a retry"]


def test_a_tick_that_fails_is_retried(tmp_path: Path) -> None:
    assert parsed(tmp_path, TIME, command="false")["results"] == ["failed"]
