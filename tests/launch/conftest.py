"""Fixtures of the launch tests: an undisturbed reference run, S3, and places of checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fork_servers import end_servers
from tests.launch.checkpoint_places import Kept, s3_kept, use
from tests.launch.undisturbed import CHECKPOINT_EVERY, STEPS
from tests.packaging.places import BUCKET, KEYS, s3_server

import trainload
from trainload.autograd_trace.compiling.inductor import Compiled, compile_graph
from trainload.launching.node import build
from trainload.launching.run.result import RunResult
from trainload.packaging.package import Package


@pytest.fixture(scope="session")
def undisturbed(
    ray_cluster: None, gpt: Package, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunResult:
    """Uninterrupted, uncompiled run of the GPT on two Ray workers under ZeRO-3."""
    plan = trainload.plan(gpt, trainload.Cluster(devices_per_node=2), "zero3")
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return trainload.launch(
        gpt,
        plan,
        gpt_data,
        run_dir=folder,
        steps=STEPS,
        checkpoint_every=CHECKPOINT_EVERY,
        compile=False,
    )


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """XDG_RUNTIME_DIR of a module's tests, whose fork servers end with them."""
    folder = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder
        end_servers(folder)


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """URL of moto's S3 server, which has a bucket."""
    with s3_server() as url:
        yield url


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of the S3 server, which this process and its children use."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_url, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    use(s3_url)
    return s3_url


@pytest.fixture(
    params=[
        "folder",
        pytest.param("file", marks=pytest.mark.slow),
        pytest.param("memory", marks=pytest.mark.slow),
        "s3",
    ]
)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """An empty place of checkpoints."""
    match request.param:
        case "s3":
            request.getfixturevalue("s3")
            return s3_kept()
        case "memory":
            return Kept(f"memory://{secrets.token_hex(8)}/run")
        case "file":
            return Kept(f"file://{tmp_path}/kept")
        case _:
            return Kept(str(tmp_path / "kept"))


@pytest.fixture
def bucket(s3: str) -> Kept:
    """An empty place of checkpoints in S3."""
    return s3_kept()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs that are compiled from now on."""
    names: list[str] = []

    def noted(
        module: torch.fx.GraphModule, path: Path, groups: Mapping[str, int], *rest: Any
    ) -> Compiled:
        names.append(path.stem)
        return compile_graph(module, path, groups, *rest)

    monkeypatch.setattr(build, "compile_graph", noted)
    return names


@pytest.fixture
def url(s3: str) -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(8)}/runs/first"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine that has never seen a run."""
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
