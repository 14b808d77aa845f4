"""Package and data of the small model whose settings are changed, and runs of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch.optimizer_jobs import frozen, write_data

from trainload.packaging.package import Package


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for the package."""
    return write_data(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The frozen model, which tests do not change."""
    return frozen(tmp_path_factory)
