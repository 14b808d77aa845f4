"""A page as a program: its blocks, in order, in one folder.

- A block with a title ("job.py") is a file, written as it is.
- A `bash` block is run by bash. The `text` block that follows is what it prints: each line is in
  the output, in this order, with other numbers and other spaces; "..." stands for any lines.
- Other Python is a script, run by `python -`.

Commands that need what a test lacks are left out by a named reason (`page_commands.py`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.documentation.page_commands import Block, blocks, commands, is_program
from tests.house.source import ROOT

_NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
SECONDS = 540


def pages(folder: str) -> list[Path]:
    """Return the pages of a folder of docs/ that have blocks and run as programs."""
    found = sorted((ROOT / "docs" / folder).glob("*.md"))
    return [page for page in found if blocks(page) and is_program(str(page.relative_to(ROOT)))]


def _shape(line: str) -> str:
    """Return a line with its numbers and its spaces made equal."""
    return " ".join(_NUMBER.sub("N", line).split())


def _is_printed(shape: str, line: str) -> bool:
    """Return True if a line is the expected one, in which "..." stands for any text."""
    return re.fullmatch(re.escape(shape).replace(r"\.\.\.", ".*"), line) is not None


def missing_lines(expected: str, output: str) -> list[str]:
    """Return the expected lines that the output does not have, in order."""
    printed = iter([_shape(line) for line in output.splitlines()])
    shapes = [_shape(line) for line in expected.splitlines() if line.strip() not in ("", "...")]
    return [shape for shape in shapes if not any(_is_printed(shape, line) for line in printed)]


def _replaced(block: Block, replacements: Mapping[str, str]) -> Block:
    """Return a block with other sizes."""
    text = block.text
    for before, after in replacements.items():
        text = text.replace(before, after)
    return replace(block, text=text)


def output_of(
    command: list[str], given: str, folder: Path, variables: Mapping[str, str] | None = None
) -> str:
    """Return what a program prints, given its input and more environment variables."""
    environment = {
        **os.environ,
        **(variables or {}),
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
            lines = [command.text for command in commands(block) if not command.reason]
            output = output_of(["bash", "-euo", "pipefail"], "\n".join(lines), folder)
        elif block.language == "python":
            output = output_of([sys.executable, "-"], block.text, folder)
        elif block.language == "text":
            assert missing_lines(block.text, output) == [], output
        else:
            raise AssertionError(f"{page.name}: a block in {block.language!r} without a title")
        count += 1
    return count
