"""`made_once` creates slow test data once per run of the suite."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.shared import made_once


def maker(file: str) -> Callable[[Path], object]:
    """Return a function of a file of this name, which writes a file to the folder that it fills."""
    module: Any = types.ModuleType("conftest")
    exec(
        compile(
            "def make(folder):\n    (folder / __name__).write_text(str(folder))\n", file, "exec"
        ),
        vars(module),
    )
    make: Callable[[Path], object] = module.make
    return make


def test_what_was_made_is_not_made_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    first = (
        made_once(tmp_path_factory, "own", maker("/once/conftest.py")) / "conftest"
    ).read_text()
    again = (
        made_once(tmp_path_factory, "own", maker("/once/conftest.py")) / "conftest"
    ).read_text()
    assert first == again


def test_other_files_may_make_other_things_of_one_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    places = {
        made_once(tmp_path_factory, "small", maker(f"/{folder}/conftest.py"))
        for folder in ("one", "other")
    }
    assert len({(place / "conftest").read_text() for place in places}) == 2
