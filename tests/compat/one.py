"""Freeze or open packages with one torch, in an environment of its own, for the matrix.

    python -m tests.compat.one freeze|open FILE FOLDER...

PYTHONPATH must contain the repository's root and src/.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.golden.goldens import Golden, train
from tests.golden.jobs import CASES
from tests.golden.make import make

import trainload
from trainload.core.errors import TrainloadError


def freeze(folder: Path) -> dict[str, Any]:
    """Freeze the job of every golden into `folder`, with the losses that this torch computes.

    Returns:
        case -> error message, "" if there was none.
    """
    told = {}
    for name, case in CASES.items():
        try:
            make(name, case, folder / name)
            told[name] = ""
        except (TrainloadError, RuntimeError, AssertionError) as error:
            told[name] = _line(error)
    return told


def tried(folder: Path) -> dict[str, Any]:
    """Open one package and train it.

    Return whether it loads and trains, the greatest relative difference from its recorded losses,
    and an error message.
    """
    golden = Golden(folder)
    try:
        package = trainload.open(golden.package, **golden.opening)
        package.check_contents()
        package.program()
    except (TrainloadError, RuntimeError) as error:
        return {"loads": False, "trains": False, "apart": None, "why": _line(error)}
    if not (folder / "losses.json").exists():
        return {"loads": True, "trains": None, "apart": None, "why": "it has shapes alone"}
    expected = json.loads((folder / "losses.json").read_text())
    try:
        with tempfile.TemporaryDirectory() as run_dir:
            found = train(package, golden.data, Path(run_dir) / "run", **golden.opening)
    except (TrainloadError, RuntimeError) as error:
        return {"loads": True, "trains": False, "apart": None, "why": _line(error)}
    pairs = [
        pair for kind in ("train", "eval") for pair in zip(found[kind], expected[kind], strict=True)
    ]
    return {
        "loads": True,
        "trains": True,
        "apart": max(abs(a - b) / abs(b) for a, b in pairs),
        "why": "",
    }


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def main(verb: str, file: Path, folders: Sequence[Path]) -> None:
    """Write the results to a JSON file."""
    warnings.simplefilter("ignore")
    results = (
        freeze(folders[0])
        if verb == "freeze"
        else {str(folder): tried(folder) for folder in folders}
    )
    file.write_text(
        json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
