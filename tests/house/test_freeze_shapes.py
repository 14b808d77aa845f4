"""`trainload freeze --explain-shapes` and `--apply-suggested-fixes`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainload
import trainload.spec
from trainload import cli
from trainload.packaging.canonical import parse_canonical

JOB = """
import torch
import trainload
import trainload.spec
from torch.export import Dim


class Positioned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.positions = torch.nn.Parameter(torch.zeros(16, 8))

    def forward(self, x):
        return self.linear(x) + self.positions[: x.shape[1]]


def made(dim):
    return trainload.Job(
        model=Positioned(),
        batch={"x": torch.randn(4, 6, 8)},
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dynamic={"x": {1: dim}},
    )


def wide():
    return made(Dim("seq"))


def narrow():
    return made(Dim("seq", max=16))
"""
LINE = JOB.splitlines().index("        return self.linear(x) + self.positions[: x.shape[1]]") + 1

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder that holds the jobs and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "positioned.py").write_text(JOB)
    yield tmp_path
    sys.modules.pop("positioned", None)


def test_a_table_says_what_each_dim_may_be_and_the_freeze_goes_on(here: Path, capsys: Capture) -> None:
    assert cli.run(["freeze", "positioned.py:narrow", "-o", "out.tl", "--explain-shapes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["dim", "example", "may", "be", "declared", "because", "of", "for", "more"]
    (row,) = (line for line in lines if line.startswith("x[1]"))
    assert re.split(r"\s{2,}", row.strip())[2:] == [
        "seq: 0..16",
        "Dim('seq', max=16)",
        f"positioned.py:{LINE} seq <= 16",
        f"Change positioned.py:{LINE}, which needs seq <= 16, then raise the max of Dim('seq', max=16).",
    ]
    assert "return self.linear(x) + self.positions[: x.shape[1]]" in lines[lines.index(row) + 1]
    assert (here / "out.tl").is_dir()


def test_the_table_is_printed_where_torch_refuses_the_sizes(here: Path, capsys: Capture) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl", "--explain-shapes"]) == 2
    printed = capsys.readouterr()
    assert "seq: 2..16" in printed.out
    assert "torch suggests (--apply-suggested-fixes): seq = Dim('seq', max=16)" in printed.out.splitlines()
    assert 1 < len(printed.err.splitlines()) <= 24
    assert not (here / "out.tl").exists()


def test_suggested_fixes_are_applied_printed_and_recorded(here: Path, capsys: Capture) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl", "--apply-suggested-fixes"]) == 0
    assert "applied  x[1]: Dim('seq') became Dim('seq', max=16) for the train graph" in capsys.readouterr().out
    record = parse_canonical((here / "out.tl/debug/batch.json").read_bytes(), "debug/batch.json")
    assert record["dynamic"] == {"x": {"0": "Dim('batch', min=1)", "1": "Dim('seq', max=16)"}}
    (fix,) = record["fixes"]
    assert fix == {
        "graph": "train",
        "suggestion": "seq = Dim('seq', max=16)",
        "dims": ["x[1]"],
        "before": "Dim('seq')",
        "after": "Dim('seq', max=16)",
    }


def test_without_the_option_nothing_is_changed(here: Path) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl"]) == 2
    assert not (here / "out.tl").exists()


def test_json_is_one_value_with_dims_and_fixes(here: Path, capsys: Capture) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl", "--explain-shapes", "--apply-suggested-fixes", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [(d["input"], d["dim"], d["symbol"], d["most"]) for d in value["shapes"]["train"]["dims"]] == [
        ("x", 0, "batch", None),
        ("x", 1, "seq", 16),
        ("x", 2, None, 8),
    ]
    assert value["shapes"]["train"]["dims"][1]["causes"][0]["place"] == f"positioned.py:{LINE}"
    assert [fix["after"] for fix in value["fixes"]] == ["Dim('seq', max=16)"]


def test_the_verb_explains_without_writing(here: Path) -> None:
    report = trainload.explain_shapes(trainload.spec.load_job("positioned.py:wide"))
    assert report.fixes == ("seq = Dim('seq', max=16)",)
    assert [path.name for path in here.iterdir()] == ["positioned.py"]
