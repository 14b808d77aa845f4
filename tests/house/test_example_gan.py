"""Short form of the GAN's script: the command line freezes it and trains it on two Ray workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.house.source import ROOT

import trainload

pytestmark = pytest.mark.slow


def test_the_script_freezes_trains_and_measures(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples/gan/demo.py"),
        "--folder",
        str(tmp_path / "demo"),
        "--steps",
        "3",
        "--no-compile",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    result = json.loads((tmp_path / "demo/result.json").read_text())
    distance = result["energy distance to held-out digits"]
    assert done.returncode == int(distance["after"] >= distance["before"]), done.stderr
    assert 0 < distance["real"] < distance["before"]
    trained, frozen = (
        trainload.open(tmp_path / "demo" / name) for name in ("trained.tl", "gan.tl")
    )
    assert trained.manifest.parent == frozen.digest
    assert trained.manifest.weights_digest != frozen.manifest.weights_digest
