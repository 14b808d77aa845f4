"""Stores of every kind for the tests, and packages to push to them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.packaging.write import with_weights

BUCKET = "releases"
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a store that exists or is yet to be created."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.url.partition("://")[0] if "://" in self.url else "folder"

    def store(self) -> Store:
        return Store(self.url, self.options)


@contextmanager
def s3_server() -> Iterator[str]:
    """Start a server with an empty bucket, and yield its URL."""
    for library in ("moto", "s3fs", "flask"):
        if not _installed(library):
            pytest.skip(f"{library} is not installed: make env")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("s3_server.py"))]
    environment = {**os.environ, **KEYS}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        assert port, "the server did not start"
        url = f"http://127.0.0.1:{port}"
        import s3fs

        s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=url, skip_instance_cache=True
        ).mkdir(BUCKET)
        try:
            yield url
        finally:
            server.terminate()


def _installed(library: str) -> bool:
    from importlib.util import find_spec

    return find_spec(library) is not None


def s3_place(server: str) -> Place:
    """Return a new place on the server."""
    options = {"key": "test", "secret": "test", "endpoint_url": server}
    return Place(
        f"s3://{BUCKET}/{secrets.token_hex(8)}", options, {**KEYS, "AWS_ENDPOINT_URL": server}
    )


def memory_place() -> Place:
    return Place(f"memory://{secrets.token_hex(8)}/store")


def retrained(
    package: Package, path: Path, *names: str, by: float = 1.0, max_shard: int = 600
) -> Package:
    """Write a package with other values of these parameters."""
    weights = {name: package.weights.tensor(name) for name in package.weights.names()}
    return with_weights(
        package,
        path,
        ((name, tensor + by if name in names else tensor) for name, tensor in weights.items()),
        max_shard=max_shard,
    )


def last_of_shard(package: Package, shard: str) -> str:
    """Return the name of a float parameter in a shard."""
    index = json.loads((package.path / "weights/model.safetensors.index.json").read_bytes())
    names = [name for name, file in index["weight_map"].items() if file == shard]
    return next(
        str(name) for name in reversed(names) if package.weights.dtype(name).is_floating_point
    )


def travelling(path: Path) -> dict[str, bytes]:
    """Return path -> content of a package's files, except those in derived/."""
    files = (
        (file.relative_to(path).as_posix(), file)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    )
    return {name: file.read_bytes() for name, file in files if not name.startswith("derived/")}


def child(
    script: str, *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a process that runs a script of this folder."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name(script)),
        *map(str, arguments),
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
