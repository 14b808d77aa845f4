"""Processes on gloo, once for all tests that compare ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from tests.sharding.cases import WORLDS, rank_main


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    for world in WORLDS:
        processes = [context.Process(target=rank_main, args=(rank, world, str(folder)), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=200)
        for process in processes:
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in processes] == [0] * world
    return folder
