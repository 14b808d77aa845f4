"""Fixtures for the tests of stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.packaging.places import (
    Place,
    last_of_shard,
    memory_place,
    retrained,
    s3_place,
    s3_server,
)

from trainload.packaging.package import Package


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """S3 server of moto, with a bucket."""
    with s3_server() as url:
        yield url


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place for a store: a folder, fsspec's memory, S3."""
    if request.param == "folder":
        return Place(str(tmp_path / "store"))
    return memory_place() if request.param == "memory" else s3_place(request.getfixturevalue("s3"))


@pytest.fixture(params=["folder", "memory"])
def local_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place for a store that is fast."""
    return Place(str(tmp_path / "store")) if request.param == "folder" else memory_place()


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    """An empty place for a store in a folder."""
    return Place(str(tmp_path / "store"))


@pytest.fixture(scope="session")
def second(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """`packaged` with one parameter trained further, which is in the second of its three shards.

    No test changes it.
    """
    name = last_of_shard(packaged, "model-00002-of-00003.safetensors")
    return retrained(packaged, tmp_path_factory.mktemp("second") / "second.tl", name)
