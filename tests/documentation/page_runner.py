"""A page as a program: its blocks, in order, in one folder.

- A block with a title ("job.py") is a file, written as it is.
- A `bash` block is run by bash. The `text` block that follows is what it prints: each line is in
  the output, in this order, with other numbers and other spaces; "..." stands for any lines.
- Other Python is a script, run by `python -`.

Commands that need what a test lacks are left out by name, `ELSEWHERE`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.house.source import ROOT

ELSEWHERE = ("pip install ", "python -m venv ", ". venv/bin/activate", "cd ", "kubectl ", "docker ")
"""Beginnings of lines that are not run here: the package is installed, and there is no cluster."""
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
SECONDS = 540


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: word after the fence.
        title: name of the file that it is, or "".
        text: its lines.
    """

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(*match.groups(default="")) for match in _BLOCK.finditer(page.read_text())]


def pages(folder: str) -> list[Path]:
    """Return the pages of a folder of docs/ that have blocks."""
    return [page for page in sorted((ROOT / "docs" / folder).glob("*.md")) if blocks(page)]


def _shape(line: str) -> str:
    """Return a line with its numbers and its spaces made equal."""
    return " ".join(_NUMBER.sub("N", line).split())


def missing_lines(expected: str, output: str) -> list[str]:
    """Return the expected lines that the output does not have, in order."""
    printed = iter([_shape(line) for line in output.splitlines()])
    shapes = [_shape(line) for line in expected.splitlines() if line.strip() not in ("", "...")]
    return [shape for shape in shapes if shape not in printed]


def _replaced(block: Block, replacements: Mapping[str, str]) -> Block:
    """Return a block with other sizes."""
    text = block.text
    for before, after in replacements.items():
        text = text.replace(before, after)
    return replace(block, text=text)


def output_of(command: list[str], given: str, folder: Path) -> str:
    """Return what a program prints, given its input."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        command,
        input=given,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{given}\n{done.stdout}"
    return done.stdout


def run_page(page: Path, folder: Path, replacements: Mapping[str, str] | None = None) -> int:
    """Run a page's blocks in a folder.

    Args:
        page: the page.
        folder: working directory, with what the page takes for granted.
        replacements: text in the blocks -> smaller sizes.

    Returns:
        The number of blocks that were written, run or compared.
    """
    output, count = "", 0
    for written in blocks(page):
        block = _replaced(written, replacements or {})
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language == "bash":
            lines = [
                line for line in block.text.splitlines() if not line.lstrip().startswith(ELSEWHERE)
            ]
            output = output_of(["bash", "-euo", "pipefail"], "\n".join(lines), folder)
        elif block.language == "python":
            output = output_of([sys.executable, "-"], block.text, folder)
        elif block.language == "text":
            assert missing_lines(block.text, output) == [], output
        else:
            raise AssertionError(f"{page.name}: a block in {block.language!r} without a title")
        count += 1
    return count
