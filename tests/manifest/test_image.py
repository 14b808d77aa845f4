"""The Dockerfile: it has no known flaws, and makes what the manifests need."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tests.house.source import ROOT, STAGES

from trainload.deploy.kuberay import Pods, ray_cluster

DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def argument(name: str) -> str:
    found = re.search(rf"^ARG {name}=(.+)$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    return found[1]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: make env")
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_its_user_is_that_of_the_pods() -> None:
    pods = Pods(name="a", image="i", nodes=(1, 1), devices=1, gpu=False, memory="1Gi", claim=None)
    context = ray_cluster(pods)["spec"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in DOCKERFILE


def test_its_extras_and_its_python_exist() -> None:
    assert set(argument("EXTRAS").split(",")) <= PROJECT["optional-dependencies"].keys()
    assert argument("PYTHON") in SpecifierSet(PROJECT["requires-python"])


def test_the_context_has_all_that_the_wheel_is_made_of() -> None:
    needed = {"pyproject.toml", "constraints.txt", "src", *STAGES, PROJECT["readme"]}
    needed |= set(PROJECT["license-files"])
    assert {f"!{name}" for name in needed} == {line for line in IGNORED if line.startswith("!")}
