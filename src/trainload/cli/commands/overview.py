"""Help of the program: options, and commands grouped by task, so that they fit a screen."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import click

_WIDTH = 80
_GAP = 2
_ARGUMENTS = "trainload.arguments"


def given_arguments() -> tuple[str, ...]:
    """Return the arguments of the program, without its name."""
    arguments: tuple[str, ...] = click.get_current_context().meta[_ARGUMENTS]
    return arguments


class DenseCommand(click.Command):
    """A command with many options: its help has no blank lines and no --help, to fit a screen."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return --help as a hidden option."""
        return hidden(super().get_help_option(ctx))

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, description and options."""
        self.format_usage(ctx, formatter)
        with formatter.indentation():
            formatter.write_text(inspect.cleandoc(self.help or ""))
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = [option.get_help_record(ctx) for option in options]
        formatter.write_heading("Options")
        with formatter.indentation():
            formatter.write_dl([record for record in records if record is not None])


def hidden(option: click.Option | None) -> click.Option | None:
    """Return --help as a hidden option: whoever reads the help has just used it."""
    if option is not None:
        option.hidden = True
    return option


class Overview(click.Group):
    """A group whose help lists its commands by task, in the order in which they were added.

    Attributes:
        groups: title of each group -> its commands by name.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.groups: dict[str, dict[str, click.Command]] = {}

    def add_group(self, title: str, *commands: click.Command) -> None:
        """Add commands that the help lists under a title."""
        for command in commands:
            assert command.name is not None, "it is a command of this program"
            self.add_command(command)
            self.groups.setdefault(title, {})[command.name] = command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, and keep all arguments for `given_arguments`."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return --help as a hidden option."""
        return hidden(super().get_help_option(ctx))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description without the usual blank lines, which would not fit a screen."""
        formatter.write(f"{self.help}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the options as one paragraph, then the commands.

        The reference of the command line has the options' descriptions.
        """
        options = [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and not param.hidden
        ]
        usages = [
            " ".join((each.opts[0], *((each.metavar,) if each.metavar else ()))) for each in options
        ]
        formatter.write(
            textwrap.fill(
                f"Options: {', '.join(usages)}",
                _WIDTH,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            + "\n"
        )
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each group, with their short help, in two columns.

        A short help has room for 21 characters on the left and 24 on the right, with names of 10.
        """
        label = max(map(len, self.groups), default=0) + _GAP
        longest = max(map(len, self.commands), default=0) + _GAP
        half = (_WIDTH - label) // 2
        formatter.write("Commands:\n")
        for title, members in self.groups.items():
            cells = [
                f"{name:{longest}}{command.get_short_help_str()}"
                for name, command in members.items()
            ]
            for row in range(0, len(cells), 2):
                left, right = (*cells[row : row + 2], "")[:2]
                heading = "" if row else title
                formatter.write(f"{heading:{label}}{left:{half}}{right}".rstrip() + "\n")
