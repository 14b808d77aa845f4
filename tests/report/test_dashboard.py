"""The dashboard for Grafana.

tests/launch/sinks/test_prometheus.py checks that it queries exported metrics.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.launch.commands import refused

from trainload.cli import main as cli
from trainload.deploy.grafana import board

Capture = pytest.CaptureFixture[str]


def test_panels_lie_beside_one_another_and_fill_the_width() -> None:
    covered: dict[tuple[int, int], int] = {}
    for panel in board()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert covered.setdefault((x, y), panel["id"]) == panel["id"]
    height = 1 + max(y for _, y in covered)
    assert len(covered) == 24 * height
    assert len(set(covered.values())) == len(board()["panels"])


def test_source_and_runs_are_chosen_on_the_board() -> None:
    made = board()
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "run"]
    targets = [target for panel in made["panels"] for target in panel["targets"]]
    assert {target["datasource"]["uid"] for target in targets} == {"${datasource}"}
    assert [target["expr"] for target in targets if 'run=~"$run"' not in target["expr"]] == []


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["plain", "json"])
def test_it_is_printed(options: list[str], capsys: Capture) -> None:
    assert cli.run(["dashboard", *options]) == 0
    assert json.loads(capsys.readouterr().out) == board()


def test_it_is_written(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "board.json"
    assert cli.run(["dashboard", "--output", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["board"] == str(path)
    assert json.loads(path.read_text()) == board()
    assert "it exists already" in refused(["dashboard", "--output", path], tmp_path, capsys)
