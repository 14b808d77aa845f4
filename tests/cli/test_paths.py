"""Paths on this machine that commands and functions take: a URL is an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import trainload
from trainload.cli.commands.shared import LocalPath
from trainload.cli.main import commands
from trainload.core.errors import StorageError

URL = "s3://bucket/models/gpt"


def parameters(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
    """Yield each parameter of a command and its subcommands, under the command's name."""
    yield from ((name, parameter) for parameter in command.params)
    if isinstance(command, click.Group):
        for part, each in command.commands.items():
            yield from parameters(each, f"{name} {part}")


PARAMETERS = [(f"{name} {p.name}", p) for name, p in parameters(commands, "trainload")]


@pytest.mark.parametrize(
    "parameter",
    [pytest.param(p, id=name) for name, p in PARAMETERS if isinstance(p.type, LocalPath)],
)
def test_a_url_where_a_path_is_needed_is_named_as_it_was_given(parameter: click.Parameter) -> None:
    with pytest.raises(click.BadParameter, match=URL):
        parameter.type_cast_value(
            click.Context(commands), (URL,) if parameter.nargs == -1 or parameter.multiple else URL
        )


def test_no_parameter_accepts_a_url_as_a_path() -> None:
    plain = [name for name, p in PARAMETERS if type(p.type) is click.Path]
    assert plain == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: trainload.freeze(lambda: pytest.fail("the job was made"), URL),
        lambda: trainload.verify(URL),
        lambda: trainload.diff("gpt.tl", URL),
        lambda: trainload.push(URL, "store"),
    ],
    ids=["freeze", "verify", "diff", "push"],
)
def test_a_function_that_needs_a_path_refuses_a_url(call: Callable[[], object]) -> None:
    with pytest.raises(StorageError, match=URL):
        call()


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    converted = LocalPath().convert(f"file://{tmp_path}/x.tl", None, None)
    assert converted == tmp_path / "x.tl"
