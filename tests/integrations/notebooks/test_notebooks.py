"""The notebooks of examples/ run, and the outputs that they show are those of their code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.house.source import ROOT

nbformat = pytest.importorskip("nbformat", reason="make integrations installs it")
nbclient = pytest.importorskip("nbclient", reason="make integrations installs it")
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """Return a notebook after it has run in a kernel of its own."""
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": 300, "resources": {"metadata": {"path": str(folder)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    return notebook


def printed(cell: Any) -> str:
    """Return what a cell prints, without errors and pictures; a kernel may send it in parts."""
    outputs = cell.get("outputs", [])
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
@pytest.mark.filterwarnings("ignore")  # of Jupyter's libraries
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    shown = nbformat.read(path, as_version=4)
    again = executed(path, tmp_path)
    for before, after in zip(shown.cells, again.cells, strict=True):
        assert printed(before) == printed(after)
