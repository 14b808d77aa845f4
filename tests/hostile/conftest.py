"""A package with all that can be attacked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.hostile.packages import KEY
from tests.hostile.prepared import prepare

from trainload.packaging.read import Package


@pytest.fixture(scope="session")
def attacked(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of tests/packaging/jobs.py with a derived graph. No test changes it."""
    folder = tmp_path_factory.mktemp("attacked") / "job.tl"
    shutil.copytree(packaged.path, folder)
    prepare(folder)
    assert (folder / "derived" / KEY / "step.json").exists()
    return folder
