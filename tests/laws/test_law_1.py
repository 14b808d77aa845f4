"""Law 1: the package alone is enough to train.

It trains in an environment of the wheel and its dependencies, without the repository and a network.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.house.source import ROOT
from tests.laws.isolated import make_environment

import trainload
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package

STEPS = 12
CHILD = """
import importlib, json, socket, sys
from pathlib import Path

def importable(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True

try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
    network = 0
except OSError as error:
    network = error.errno

import trainload
package = trainload.open("alone.tl")
plan = trainload.plan(package, trainload.Cluster(), "single")
options = {"steps": int(sys.argv[1]), "eval_data": "held-out.npz", "output": "trained.tl"}
options |= {"backend": "local", "compile": False}
result = trainload.launch(package, plan, "rows.npz", run_dir="run", **options)
root = Path(sys.argv[2])
origins = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
answer = {
    "trainload": trainload.__file__,
    "importable": [name for name in sys.argv[3:] if importable(name)],
    "from_repository": [p for p in [*sys.path, *origins] if p and Path(p).is_relative_to(root)],
    "network": network,
    "evaluations": [entry["loss"] for entry in result.evaluations],
    "output_digest": result.output_digest,
}
print(json.dumps(answer))
"""
FOREIGN = (
    "tests.laws.gpt",
    "examples.gpt.model",
    "model",
    "job",
    "capture",
    "sharding",
    "launch",
    "pytest",
    "ray",
)
"""Modules of the job, the repository's folders, and modules that the wheel does not depend on."""


@pytest.fixture(scope="module")
def elsewhere(
    gpt: Package, gpt_data: Path, gpt_held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder that contains only a package and data."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(gpt.path, folder / "alone.tl")
    shutil.copy(gpt_data, folder / "rows.npz")
    shutil.copy(gpt_held_out, folder / "held-out.npz")
    return folder


@pytest.fixture(scope="module")
def answer(
    wheel: Path, elsewhere: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Report of a process in a fresh environment after it has trained the package."""
    environment = make_environment(tmp_path_factory.mktemp("fresh") / "venv", wheel)
    said: dict[str, Any] = json.loads(
        environment.run(CHILD, elsewhere, str(STEPS), ROOT, *FOREIGN).splitlines()[-1]
    )
    assert Path(said["trainload"]).is_relative_to(environment.python.parents[1])
    return said


def test_the_package_trains_alone(answer: dict[str, Any], gpt: Package, elsewhere: Path) -> None:
    before, after = answer["evaluations"]
    assert after < before - 0.05
    trained = trainload.open(elsewhere / "trained.tl")
    assert verify_package(trained.path).ok
    assert trained.digest == answer["output_digest"]
    assert trained.manifest.parent == gpt.digest


def test_nothing_of_the_repository_was_there(answer: dict[str, Any]) -> None:
    assert answer["importable"] == []
    assert answer["from_repository"] == []


def test_there_was_no_network(answer: dict[str, Any]) -> None:
    assert answer["network"] == errno.ENETUNREACH
