"""A package that calls operators of another library only trains if its user names the library."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.forked import done, json_said, refused_apart

from trainload.launching.data.sampler import rows

LIBRARY = """
import torch


@torch.library.custom_op("launch_library::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("a kernel for another device")


@halved.register_kernel("cpu")
def _(x):
    return x / 2


@halved.register_fake
def _(x):
    return torch.empty_like(x)


halved.register_autograd(lambda ctx, gradient: gradient / 2)
"""

JOB = """
import operators
import torch
import trainload


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return operators.halved(self.layer(x))


def job():
    torch.manual_seed(0)
    return trainload.Job(
        model=Model(),
        batch={"x": torch.randn(4, 4)},
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        steps=3,
        global_batch=4,
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with operators.py, a package whose graphs call its operators, and data."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "operators.py").write_text(LIBRARY)
    (folder / "job.py").write_text(JOB)
    np.savez(
        folder / "data.npz", x=np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32)
    )
    status, _, err = done("freeze", "job.py:job", "-o", "package.tl", cwd=folder)
    assert status == 0, err
    return folder


def manifest(folder: Path) -> Any:
    return json.loads((folder / "package.tl/manifest.json").read_bytes())


def test_the_manifest_names_the_library(folder: Path) -> None:
    assert manifest(folder)["features"] == ["custom-ops", "initialization"]
    assert list(manifest(folder)["op_libraries"]) == ["launch_library"]


def test_the_manifest_says_what_registers_the_operators(folder: Path) -> None:
    library = manifest(folder)["op_libraries"]["launch_library"]
    digest = hashlib.sha256((folder / "operators.py").read_bytes()).hexdigest()
    assert library == {
        "distribution": None,
        "version": None,
        "digest": hashlib.sha256(f'{{"operators.py":"{digest}"}}'.encode()).hexdigest(),
        "modules": ["operators"],
        "kernels": [],
        "wheels": [],
    }


def test_a_library_that_is_another_than_at_the_freeze_is_told_of(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "operators.py").write_text(f"{LIBRARY}\n# changed\n")
    status, _, err = done(
        "--library",
        f"launch_library={tmp_path / 'operators.py'}",
        "inspect",
        "package.tl",
        cwd=folder,
    )
    assert status == 0, err
    assert "warning: the package was made with the operators launch_library" in err
    assert "whose files differ here" in err


def test_a_package_is_not_opened_without_the_library(folder: Path) -> None:
    line = refused_apart(["ops", "package.tl"], folder)
    assert "allow the namespace launch_library" in line


def test_an_operator_that_nobody_registers_is_missed(folder: Path) -> None:
    line = refused_apart(["--library", "launch_library", "inspect", "package.tl"], folder)
    assert "missing" in line


def test_a_library_that_is_not_there_is_named(folder: Path) -> None:
    line = refused_apart(["--library", "launch_library=none.py", "inspect", "package.tl"], folder)
    assert "the library of launch_library: there is no such file" in line


@pytest.mark.matrix("False")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_package_trains_with_the_library(folder: Path, compiled: bool) -> None:
    words = [
        "--library",
        "launch_library=operators.py",
        "launch",
        "package.tl",
        "--data",
        "data.npz",
        "--run-dir",
        f"run-{compiled}",
    ]
    found = json_said(
        *words, "--backend", "local", *([] if compiled else ["--no-compile"]), cwd=folder
    )
    assert found["steps"] == 3
    assert found["first_loss"] == pytest.approx(expected_loss(), rel=1e-6)


def expected_loss() -> float:
    """Return the model's loss on the run's first batch in eager mode."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    data = np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32)
    return float((layer(torch.from_numpy(data[rows(0, 16, 0, 4)])) / 2).square().mean().detach())
