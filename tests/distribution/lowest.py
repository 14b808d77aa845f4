"""`make lowest`: the quick tests with the lowest versions that pyproject.toml accepts.

    python -m tests.distribution.lowest [options of pytest]

uv resolves each direct dependency, and each of the extras for users, to its lowest version, and
makes an environment in .lowest/ (some 6 GB, since this torch is a CUDA build).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.distribution.requirements import DEVELOPERS, extras
from tests.house.source import ROOT

FOLDER = ROOT / ".lowest"
TOOLS = (
    "aiohttp",
    "expecttest",
    "flask",
    "flask-cors",
    "hypothesis",
    "jsonschema",
    "lion-pytorch==0.2.5",
    "moto[s3]",
    "pip",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "scikit-learn",
    "setuptools",
    "wheel",
)
"""Libraries that the tests import; not at their lowest versions."""
TESTS = (
    "tests/autograd_trace",
    "tests/capture/tracing",
    "tests/cli",
    "tests/core",
    "tests/export",
    "tests/huggingface",
    "tests/launch/data",
    "tests/launch/sinks",
    "tests/packaging",
    "tests/report",
    "tests/sharding",
)
"""The folders of tests that use a dependency in some way of its own."""


def main(options: Sequence[str]) -> int:
    """Make the environment, and run the tests in it. Return the exit status of pytest."""
    FOLDER.mkdir(exist_ok=True)
    pins = FOLDER / "requirements.txt"
    python = FOLDER / "venv" / "bin" / "python"
    chosen = [word for extra in sorted(extras() - DEVELOPERS) for word in ("--extra", extra)]
    resolve = ["pip", "compile", "--quiet", "--resolution", "lowest-direct", "--output-file", pins]
    uv(*resolve, "--python-version", "3.11", ROOT / "pyproject.toml", *chosen)
    uv("venv", "--quiet", "--clear", "--python", sys.executable, python.parents[1])
    uv("pip", "install", "--quiet", "--python", python, "-r", pins)
    uv("pip", "install", "--quiet", "--python", python, "-c", pins, *TOOLS)
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    tests = ["-m", "not slow and not alone", "-p", "no:cacheprovider", *(options or TESTS)]
    # releases of years ago warn of what newer releases of others have deprecated
    tests += ["--override-ini", "filterwarnings=default"]
    return subprocess.run(
        [str(python), "-m", "pytest", "-n", "2", "--dist", "loadfile", *tests],
        cwd=ROOT,
        env=variables,
        check=False,
    ).returncode


def uv(*arguments: object) -> None:
    subprocess.run(["uv", *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
