"""The command line accepts every command in README.md and docs/."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from tests.house.source import ROOT

from trainload.cli import main as cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """Return the commands in a page's indented and fenced blocks, each on one line."""
    joined = re.sub(r"\\\n\s*", "", page.read_text())
    fenced = "".join(re.findall(r"^```bash\n(.*?)^```", joined, re.MULTILINE | re.DOTALL))
    return [
        *re.findall(r"^    (trainload .*)$", joined, re.MULTILINE),
        *re.findall(r"^(trainload .*)$", fenced, re.MULTILINE),
    ]


COMMANDS = [
    (f"{page.name}: {command[:60]}", command) for page in PAGES for command in commands(page)
]


@pytest.fixture(autouse=True)
def _only_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are parsed but not run: this machine does not have a page's files."""
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *rest: Path(value))
    monkeypatch.setattr(click.Command, "invoke", lambda *_: None)


@pytest.mark.parametrize(
    "command", [command for _, command in COMMANDS], ids=[name for name, _ in COMMANDS]
)
def test_a_command_of_a_page_is_taken(command: str) -> None:
    """In a page, [--option] is optional, and # after a space begins a comment."""
    words = shlex.split(re.sub(r"\[|\](?=\s|$)|\s+#.*", "", command))
    cli.commands.main(words[1:], prog_name="trainload", standalone_mode=False)
