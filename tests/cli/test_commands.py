"""The command line accepts every command in README.md and docs/."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from tests.documentation.page_commands import PAGES, blocks, commands, commands_in_file

from trainload.cli import main as cli


def calls(page: Path) -> list[str]:
    """Return the calls of trainload in a page's blocks, each on one line."""
    found = [call for block in blocks(page) for call in commands_in_file(block)]
    texts = [command.text for block in blocks(page) for command in commands(block)]
    matches = [_CALL.match(text) for text in texts]
    return [*found, *(match[1] for match in matches if match is not None)]


_CALL = re.compile(r"(?:[A-Z_]+=\S+ |torchrun .* -m )*(trainload .*)")
COMMANDS = [(f"{page.name}: {command[:60]}", command) for page in PAGES for command in calls(page)]


@pytest.fixture(autouse=True)
def _only_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are parsed but not run: this machine does not have a page's files."""
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *rest: Path(value))
    monkeypatch.setattr(click.Command, "invoke", lambda *_: None)


@pytest.mark.parametrize(
    "command", [command for _, command in COMMANDS], ids=[name for name, _ in COMMANDS]
)
def test_a_command_of_a_page_is_taken(command: str) -> None:
    words = shlex.split(command.replace("$SLURM_NNODES", "4"))
    cli.commands.main(words[1:], prog_name="trainload", standalone_mode=False)
