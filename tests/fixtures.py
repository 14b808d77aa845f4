"""Fixtures that all tests share."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from tests.fork_servers import end_servers
from tests.hostile.prepared import make_base
from tests.launch.tiny import tiny_job
from tests.launch.tiny import write_rows as write_tiny_rows
from tests.laws.gpt import gpt_job, write_rows
from tests.laws.isolated import build_wheel
from tests.packaging.jobs import Job, make_job
from tests.packaging.signers import Signers, make_signers
from tests.ranks import fork_server
from tests.shared import frozen_once, made_once, run_folder

from trainload.packaging.package import Package
from trainload.packaging.write import write_package
from trainload.sharding.planner.plan_source import Source

MANY = 10
"""Number of tests above which a process starts its fork server early, since some use ranks."""


@pytest.fixture(scope="session", autouse=True)
def cache_dir(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A cache and a state folder (with a user key) for this run, in place of the user's own.

    All processes of the run share the cache, so each graph is compiled once. A process with many
    tests starts the fork server of its ranks while the first tests run.
    """
    folder = run_folder(tmp_path_factory) / "cache"
    runtime = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        patch.setenv("TRAINLOAD_CACHE_DIR", str(folder))
        patch.setenv("TRAINLOAD_STATE_DIR", str(folder.with_name("state")))
        if request.session.testscollected > MANY:
            fork_server()
            forkserver.ensure_running()
        yield folder
        end_servers(runtime)


@pytest.fixture(scope="session")
def ray_cluster(cache_dir: Path) -> Iterator[None]:
    """A Ray cluster of two CPUs on this machine, which `trainload.launch` finds without an address.

    Its workers use the session's cache.
    """
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # the default is 15: next to busy processes a run took longer than pytest's ten minutes
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Ray
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The laws' GPT, frozen, with the step graphs of training and evaluation stored in the package.

    No test changes it.
    """
    return frozen_once(tmp_path_factory, "gpt", gpt_job)


@pytest.fixture(scope="session")
def gpt_source(gpt: Package) -> Source:
    """The source of plans for `gpt`, which derives and divides its graphs only once."""
    return Source(gpt)


@pytest.fixture(scope="session")
def gpt_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data for `gpt`: not a multiple of its global batch, so that steps cross epochs."""
    return write_rows(tmp_path_factory.mktemp("rows") / "train.npz", 91, seed=1)


@pytest.fixture(scope="session")
def gpt_held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluation data for `gpt`."""
    return write_rows(tmp_path_factory.mktemp("rows") / "held-out.npz", 21, seed=2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A model of three layers, frozen, for tests that do not depend on the model.

    No test changes it.
    """
    return frozen_once(tmp_path_factory, "tiny", tiny_job)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data for `tiny`: not a multiple of its global batch, so that steps cross epochs."""
    return write_tiny_rows(tmp_path_factory.mktemp("rows") / "train.npz", 91)


@pytest.fixture(scope="session")
def job() -> Job:
    """A job captured by hand, with everything that a graph file must store."""
    return make_job()


@pytest.fixture(scope="session")
def packaged(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of `job`, with every kind of file. No test changes it."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "LICENSE").write_text("do as you like\n")
    return write_package(
        folder / "job.tl",
        job.program,
        job.updates,
        job.recipe,
        assets={"LICENSE": folder / "LICENSE"},
        max_shard=600,
    )


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the same job with a derived graph, for tests of hostile packages.

    No test changes it.
    """
    return made_once(tmp_path_factory, "attacked", make_base) / "base.tl"


@pytest.fixture
def copied(packaged: Package, tmp_path: Path) -> Path:
    """A copy of `packaged` that a test may damage."""
    target = tmp_path / "copy.tl"
    shutil.copytree(packaged.path, target)
    return target


@pytest.fixture(scope="session")
def signers(tmp_path_factory: pytest.TempPathFactory) -> Signers:
    """Keys and certificates of people who sign packages."""
    return make_signers(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy of its source."""
    (built,) = made_once(tmp_path_factory, "wheel", build_wheel).glob("trainload-*.whl")
    return built
