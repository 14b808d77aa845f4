"""Makes once in a run of the suite, in whichever of its processes needs it first, what is slow to make."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of this run of pytest share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run, which `make` has filled in one of its processes. Nobody may change it.

    make: receives the folder, empty. Where it fails, the next process that asks tries again. Functions of other files may make other things
        of one name.
    """
    source = Path(inspect.getfile(make))  # conftest.py of every folder is the module `conftest`
    place = run_folder(factory) / f"shared-{source.parent.name}-{source.stem}-{name}"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            draft = factory.mktemp(name)
            make(draft)
            draft.rename(place)
    return place
