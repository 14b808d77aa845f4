"""Small distributions with sinks, as folders on the path of modules."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

RECORDING = '''
"""A sink that writes what it receives to a file of the run's folder."""


class Recording:
    def __init__(self, run_dir):
        self._file = open(run_dir / "recorded.txt", "a")

    def numbers(self, values, step, time):
        if "loss" in values:
            self._file.write(f"{step} {values['loss']!r}\\n")

    def text(self, kind, message, step, time):
        self._file.write(f"{kind} {message}\\n")

    def close(self, outcome):
        self._file.write(f"{outcome}\\n")
        self._file.close()
'''


def write_distribution(folder: Path, name: str, code: str, sinks: dict[str, str]) -> None:
    """Write a distribution `name` with a module `name` of this code, as an installer leaves it.

    `sinks` has the objects of the module by the names of the sinks.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{sink} = {name}:{thing}" for sink, thing in sinks.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[trainload.sinks]", *lines, ""]))


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str, sinks: dict[str, str]
) -> None:
    """Write a distribution, and add it to this process until the end of the test."""
    write_distribution(folder, name, code, sinks)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
