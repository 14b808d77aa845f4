"""The documentation's site builds strictly, and has every command, option and public name."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.house.source import ROOT

import trainload
from trainload.cli.main import commands


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without warnings: no broken link, anchor or name."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder


def every_command(
    group: click.Group = commands, path: str = "trainload"
) -> Iterator[tuple[str, click.Command]]:
    """Yield each command with its full name."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from every_command(command, f"{path} {name}")


def test_the_reference_has_every_command_and_option(site: Path) -> None:
    page = html.unescape((site / "reference" / "cli.html").read_text())
    headings = re.findall(r"<h\d id=\"[^\"]+\">(trainload[^<]*)<", page)
    missing = [name for name, _ in every_command() if name not in headings]
    for name, command in every_command():
        part = page.partition(f">{name}<")[2].partition("<h")[0]
        missing += [
            f"{name} {option}"
            for each in command.params
            if isinstance(each, click.Option)
            for option in (*each.opts, *each.secondary_opts)
            if option not in part
        ]
    assert missing == []


def test_every_option_has_a_description() -> None:
    options = [
        (name, each)
        for name, command in [("trainload", commands), *every_command()]
        for each in command.params
        if isinstance(each, click.Option)
    ]
    assert [f"{name} {each.opts[0]}" for name, each in options if not each.help] == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference" / "api").glob("*.html"))
    headings = set(re.findall(r"</code>\s*trainload\.(\w+)\s", pages))
    assert {name for name in trainload.__all__ if name != "__version__"} - headings == set()


def test_the_site_asks_the_network_for_nothing(site: Path) -> None:
    asked = re.compile(r"(?:src|<link[^>]* href)=\"(https?://[^\"]+)\"")
    assert {
        str(page.relative_to(site)): found
        for page in site.rglob("*.html")
        if (found := asked.findall(page.read_text()))
    } == {}
