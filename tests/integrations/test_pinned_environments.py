"""The environments of `make integrations` are pinned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.house.source import ROOT

FOLDER = ROOT / "tests" / "integrations"


def pins(file: Path) -> dict[str, str]:
    """Return the versions of a file of constraints by name."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("name", ["mlflow", "airflow"])
def test_everything_that_an_environment_installs_is_pinned(name: str) -> None:
    rule = (ROOT / "Makefile").read_text().partition(f"\n.{name}/.stamp: ")[2].partition("\n\n")[0]
    assert rule.startswith(f"tests/integrations/{name}.txt\n")
    (packages,) = re.findall(r"pip install --quiet -c \$< (.+)", rule)
    assert set(packages.split()) <= pins(FOLDER / f"{name}.txt").keys()


def test_mlflows_server_has_the_version_of_its_client() -> None:
    client = pins(ROOT / "constraints.txt")["mlflow-skinny"]
    assert pins(FOLDER / "mlflow.txt")["mlflow"] == client
