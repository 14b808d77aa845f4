"""Processes on gloo, once for all tests that compare ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ranks import on_ranks
from tests.sharding.cases import WORLDS, prepare, rank_main


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    for world in WORLDS:
        on_ranks(world, rank_main, folder, prepare=prepare)
    return folder
