"""A rank that runs out of memory reports its usage, the estimate, and a plan that needs less."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.launch.wide import ROWS, WIDTH, wide_job
from tests.ranks import ran

import trainload
from trainload.core.errors import OutOfMemoryError
from trainload.launching.run.journal import read_events
from trainload.launching.verification.allocation_errors import is_out_of_memory
from trainload.packaging.package import Package

MORE = 700 * 2**20
"""Bytes that the process may allocate in addition to those in use.

An activation of all rows in one call needs more.
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(wide_job(), tmp_path_factory.mktemp("wide") / "job.tl")


def train_with_little_memory(package: str, data: str, run_dir: str) -> None:
    opened = trainload.open(package)
    plan = trainload.plan(opened, trainload.Cluster(), "single")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE, resource.RLIM_INFINITY))
    trainload.launch(opened, plan, data, run_dir=run_dir, backend="local", compile=False)


def test_the_error_says_what_was_held_and_which_plan_needs_less(
    package: Package, tmp_path: Path
) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((ROWS, WIDTH), np.float32))
    status, said = ran(
        train_with_little_memory,
        str(package.path),
        str(tmp_path / "rows.npz"),
        str(tmp_path / "run"),
        cwd=tmp_path,
    )
    assert status == 1
    last = read_events(tmp_path / "run")[-1]
    assert (last.kind, last.data["error"]) == ("failed", OutOfMemoryError.__name__), said
    message = last.data["message"]
    assert message.startswith("step 1: rank 0 ran out of memory: ")
    assert re.search(
        r"parameters [\d.]+ \w+, optimizer state [\d.]+ \w+, buffers [\d.]+ \w+", message
    )
    estimate = re.search(r"estimated to need ([\d.]+) GiB \(.*activations ([\d.]+) GiB", message)
    assert estimate is not None and float(estimate[1]) > 1.5
    plan = re.search(
        r"A plan with --strategy single .*--accumulate (\d+) was estimated to need", message
    )
    assert plan is not None and ROWS % int(plan[1]) == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_every_allocators_words_are_known(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_none_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
