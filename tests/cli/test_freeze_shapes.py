"""`trainload freeze --explain-shapes` and `--apply-suggested-fixes`."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

import trainload
import trainload.freezing.load_job
from trainload.cli import main as cli
from trainload.core.canonical_json import parse_canonical

JOB = """
import torch
import trainload
import trainload.freezing.load_job
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


@contextmanager
def placed(folder: Path) -> Iterator[None]:
    """Change to a folder that contains only the jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("COLUMNS", "300")
        (folder / "positioned.py").write_text(JOB)
        yield
        sys.modules.pop("positioned", None)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    with placed(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a freeze with both options and --json."""
    folder, printed = tmp_path_factory.mktemp("told"), io.StringIO()
    with placed(folder), redirect_stdout(printed):
        assert (
            cli.run(
                [
                    "freeze",
                    "positioned.py:wide",
                    "-o",
                    "out.tl",
                    "--explain-shapes",
                    "--apply-suggested-fixes",
                    "--json",
                ]
            )
            == 0
        )
    return folder, printed.getvalue()


def assert_recorded(folder: Path) -> None:
    """Check that the package records the sizes and the fixes that it was frozen with."""
    record = parse_canonical((folder / "out.tl/debug/batch.json").read_bytes(), "debug/batch.json")
    assert record["dynamic"] == {"x": {"0": "Dim('batch', min=1)", "1": "Dim('seq', max=16)"}}
    (fix,) = record["fixes"]
    assert fix == {
        "graph": "train",
        "suggestion": "seq = Dim('seq', max=16)",
        "dims": ["x[1]"],
        "before": "Dim('seq')",
        "after": "Dim('seq', max=16)",
    }


def test_a_table_says_what_each_dim_may_be_and_the_freeze_goes_on(
    here: Path, capsys: Capture
) -> None:
    assert cli.run(["freeze", "positioned.py:narrow", "-o", "out.tl", "--explain-shapes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "dim",
        "example",
        "may",
        "be",
        "declared",
        "because",
        "of",
        "for",
        "more",
    ]
    (row,) = (line for line in lines if line.startswith("x[1]"))
    assert re.split(r"\s{2,}", row.strip())[2:] == [
        "seq: 0..16",
        "Dim('seq', max=16)",
        f"positioned.py:{LINE} seq <= 16",
        (
            f"Change positioned.py:{LINE}, which needs seq <= 16, then raise the max of Dim('seq',"
            " max=16)."
        ),
    ]
    assert "return self.linear(x) + self.positions[: x.shape[1]]" in lines[lines.index(row) + 1]
    assert (here / "out.tl").is_dir()


@pytest.mark.slow  # test_shape_report.py tests the content of such a report
def test_the_table_is_printed_where_torch_refuses_the_sizes(here: Path, capsys: Capture) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl", "--explain-shapes"]) == 2
    printed = capsys.readouterr()
    assert "seq: 2..16" in printed.out
    assert (
        "torch suggests (--apply-suggested-fixes): seq = Dim('seq', max=16)"
        in printed.out.splitlines()
    )
    assert 1 < len(printed.err.splitlines()) <= 24
    assert not (here / "out.tl").exists()


@pytest.mark.slow  # the next tests check the same fixes in the record and as JSON
def test_suggested_fixes_are_applied_printed_and_recorded(here: Path, capsys: Capture) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl", "--apply-suggested-fixes"]) == 0
    assert (
        "applied  x[1]: Dim('seq') became Dim('seq', max=16) for the train graph"
        in capsys.readouterr().out
    )
    assert_recorded(here)


def test_without_the_option_nothing_is_changed(here: Path) -> None:
    assert cli.run(["freeze", "positioned.py:wide", "-o", "out.tl"]) == 2
    assert not (here / "out.tl").exists()


def test_applied_fixes_are_recorded(told: tuple[Path, str]) -> None:
    assert_recorded(told[0])


def test_json_is_one_value_with_dims_and_fixes(told: tuple[Path, str]) -> None:
    value = json.loads(told[1])
    assert [
        (d["input"], d["dim"], d["symbol"], d["most"]) for d in value["shapes"]["train"]["dims"]
    ] == [
        ("x", 0, "batch", None),
        ("x", 1, "seq", 16),
        ("x", 2, None, 8),
    ]
    assert value["shapes"]["train"]["dims"][1]["causes"][0]["place"] == f"positioned.py:{LINE}"
    assert [fix["after"] for fix in value["fixes"]] == ["Dim('seq', max=16)"]


def test_the_verb_explains_without_writing(here: Path) -> None:
    report = trainload.explain_shapes(trainload.freezing.load_job.load_job("positioned.py:wide"))
    assert report.fixes == ("seq = Dim('seq', max=16)",)
    assert [path.name for path in here.iterdir()] == ["positioned.py"]
