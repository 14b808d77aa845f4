"""The CronWorkflow of examples/ is one for Argo's own schema, and its command retrains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.house.source import ROOT
from tests.integrations.orchestrators.lines import write_line

models = pytest.importorskip(
    "hera.workflows.models", reason="hera is not installed: make integrations"
)
FILE = ROOT / "examples" / "orchestrators" / "retrain_cronworkflow.yaml"
TIME = "2026-01-02T03:00:00Z"
"""A time as Argo writes it into {{workflow.scheduledTime}}: RFC 3339."""


def workflow() -> Any:
    return yaml.safe_load(FILE.read_text())


def test_argos_models_have_every_key_of_it() -> None:
    parsed = models.CronWorkflow.model_validate(workflow())
    again = json.loads(parsed.model_dump_json(by_alias=True, exclude_none=True))
    assert again == workflow()


def template() -> Any:
    (found,) = workflow()["spec"]["workflowSpec"]["templates"]
    return found


def ticked(file: Path, time: str = TIME) -> subprocess.CompletedProcess[str]:
    """Run the container's command with Argo's values filled in."""
    container = template()["container"]
    assert container["command"] == ["trainload"]
    values = {"/data/retrain.yaml": str(file), "{{workflow.scheduledTime}}": time}
    words = [values.get(word, word) for word in container["args"]]
    assert set(values.values()) <= set(words)
    command = [sys.executable, "-m", "trainload", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_its_command_runs_a_tick_and_a_retry_reports_the_same(tmp_path: Path) -> None:
    file = write_line(tmp_path)
    first, second = ticked(file), ticked(file)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    outcome = json.loads(first.stdout)
    assert outcome["outcome"] == "promoted"
    assert json.loads(second.stdout)["release"] == outcome["release"]


def test_a_time_before_that_of_the_last_tick_is_not_retried(tmp_path: Path) -> None:
    file = write_line(tmp_path)
    assert ticked(file).returncode == 0
    assert ticked(file, "2026-01-01T03:00:00Z").returncode == 2


def test_a_mistake_in_the_file_has_the_status_that_is_not_retried(tmp_path: Path) -> None:
    (tmp_path / "retrain.yaml").write_text("line: small\n")
    done = ticked(tmp_path / "retrain.yaml")
    assert template()["retryStrategy"]["expression"] == f'lastRetry.exitCode != "{done.returncode}"'
