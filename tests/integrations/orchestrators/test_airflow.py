"""The DAG of examples/ is one for Airflow, and its task retrains.

Airflow has an environment of its own, since its requirements exclude others: make integrations.
"""

from __future__ import annotations

import json
import os
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

bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
dag = bag.dags["retrain"]
task = dag.get_task("tick")
results = []
for time in sys.argv[2:]:
    try:
        results.append(task.python_callable(data_interval_end=datetime.fromisoformat(time)))
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


def parsed(folder: Path, *times: str, command: str = f"{sys.executable} -m trainload") -> Any:
    """Parse the DAG in Airflow's environment, and call its task for some times."""
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "RETRAIN_FILE": str(folder / "retrain.yaml"),
        "TRAINLOAD": command,
    }
    done = subprocess.run(
        [str(PYTHON), "-c", _PARSE, str(DAG), *times],
        env=environment,
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


def test_a_mistake_in_the_file_is_not_retried(tmp_path: Path) -> None:
    (tmp_path / "retrain.yaml").write_text("line: small\n")
    assert parsed(tmp_path, TIME)["results"] == ["failed, without a retry"]


def test_a_tick_that_fails_is_retried(tmp_path: Path) -> None:
    assert parsed(tmp_path, TIME, command="false")["results"] == ["failed"]
