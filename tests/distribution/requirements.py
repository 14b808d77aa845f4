"""The requirements of pyproject.toml."""

from __future__ import annotations

import functools
import tomllib
from typing import Any

from packaging.requirements import Requirement
from tests.house.source import ROOT

DEVELOPERS = {"coverage", "dev", "docs", "fuzz", "integrations"}
"""Extras that serve the repository alone."""


@functools.cache
def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def extras() -> set[str]:
    return set(project()["optional-dependencies"])


def requirements() -> list[Requirement]:
    """Return what users install: the dependencies, and those of the extras for users."""
    chosen = project()["optional-dependencies"]
    texts = [text for extra in sorted(extras() - DEVELOPERS) for text in chosen[extra]]
    return [Requirement(text) for text in (*project()["dependencies"], *texts)]
