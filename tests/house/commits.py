"""Commits of the checkout, for pages of results."""

from __future__ import annotations

import subprocess

from tests.house.source import ROOT


def head_commit() -> str:
    """Return the commit of the checkout, abbreviated."""
    return _git("rev-parse", "--short", "HEAD")


def last_change(path: str) -> str:
    """Return the commit that last changed a file and its date, such as "1f75e899, 2026-11-30"."""
    return _git("log", "-1", "--date=short", "--format=%h, %ad", "--", path)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
