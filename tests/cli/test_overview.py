"""Overview of the commands: groups, completeness of the help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import click
import pytest

from trainload.cli import main as cli
from trainload.cli.commands.overview import Overview


def every_command(
    command: click.Command = cli.commands, name: str = "trainload"
) -> Iterator[tuple[str, click.Command]]:
    """Yield each command and subcommand under its name."""
    yield name, command
    if isinstance(command, click.Group):
        for part, each in command.commands.items():
            yield from every_command(each, f"{name} {part}")


def test_every_command_is_in_exactly_one_group() -> None:
    overview = cli.commands
    assert isinstance(overview, Overview)
    counts = Counter(name for members in overview.groups.values() for name in members)
    visible = {name for name, command in overview.commands.items() if not command.hidden}
    assert counts == dict.fromkeys(visible, 1)


def test_the_help_has_a_heading_for_each_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli.run(["--help"])
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    headings = [line[:9].strip() for line in lines if line[:1] != " "]
    assert headings == [
        "Set up",
        "Freeze",
        "Plan",
        "Run",
        "Observe",
        "Share",
        "Retrain",
    ]


def test_every_option_of_a_command_has_a_help_text() -> None:
    lacking = [
        f"{name} {option.opts[0]}"
        for name, command in every_command()
        if name != "trainload"  # its options are one paragraph
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert lacking == []


def test_no_option_is_hidden() -> None:
    hidden = [
        f"{name} {option.opts[0]}"
        for name, command in every_command()
        for option in command.params
        if isinstance(option, click.Option) and option.hidden
    ]
    assert hidden == []


@pytest.mark.parametrize("words", [["profile"], ["profile", "-o", "mine.json"]], ids=" ".join)
def test_profile_without_a_run_names_the_command_that_measures_the_machine(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words) == 2
    assert "To measure this machine" in capsys.readouterr().err
    assert cli.run([*words, "--json"]) == 2
    assert "trainload measure -o FILE" in capsys.readouterr().out
