"""Gloo processes, shared by all tests that compare ranks, and a small package.

The package serves tests of properties that plans of all jobs have.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ranks import on_ranks
from tests.selection import selected
from tests.sharding import given
from tests.sharding.cases import CASES, WORLD, prepare, rank_main, write_asked
from tests.sharding.small import small_job
from tests.shared import frozen_once

from trainload.packaging.package import Package
from trainload.sharding.planner.plan_source import Source


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with the results of each rank in each selected case."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = [case for case in CASES if case in selected(request, "case")]
    write_asked(folder, cases)
    on_ranks(WORLD, rank_main, folder, prepare=prepare)
    return folder


@pytest.fixture(scope="session")
def frozen_gpt(gpt_source: Source) -> None:
    """Makes `given.captured` read the GPT from its package."""
    given.FROZEN["gpt"] = gpt_source


@pytest.fixture(scope="session")
def small_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The frozen small job. No test changes it."""
    return frozen_once(tmp_path_factory, "small", small_job)


@pytest.fixture(scope="session")
def small_source(small_package: Package) -> Source:
    """The small package as a source of plans, so that they derive and divide its graphs once."""
    return Source(small_package)
