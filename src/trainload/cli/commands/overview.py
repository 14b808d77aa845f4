"""Help of the program: options and commands in columns, so that they fit a screen."""

from __future__ import annotations

import textwrap

import click

_WIDTH = 80
_ARGUMENTS = "trainload.arguments"


def given_arguments() -> tuple[str, ...]:
    """Return the arguments of the program, without its name."""
    arguments: tuple[str, ...] = click.get_current_context().meta[_ARGUMENTS]
    return arguments


class Overview(click.Group):
    """A group whose help lists the commands in two columns, each sorted alphabetically."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, and keep all arguments for `given_arguments`."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return --help as a hidden option: whoever reads the list has just used it."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options as one paragraph, then the commands."""
        options = [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and not param.hidden
        ]
        usages = [
            " ".join((each.opts[0], *((each.metavar,) if each.metavar else ()))) for each in options
        ]
        descriptions = [
            f"{name} ({each.help})" if each.help else name
            for name, each in zip(usages, options, strict=True)
        ]
        formatter.write(
            textwrap.fill(
                f"Options: {', '.join(descriptions)}",
                _WIDTH,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            + "\n"
        )
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their short help.

        A short help that does not fit is truncated: at most 27 characters with names of 9.
        """
        listed = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        commands = [
            (name, command)
            for name, command in listed
            if command is not None and not command.hidden
        ]
        if not commands:
            return
        longest = max(len(name) for name, _ in commands)
        room = (_WIDTH - 2 * formatter.indent_increment - 2 * (longest + 2)) // 2
        entries = [
            f"{name:{longest}}  {command.get_short_help_str(room)}" for name, command in commands
        ]
        half = -(-len(entries) // 2)
        width = longest + 2 + room + 2
        formatter.write("Commands:\n")  # not a section, whose blank line is one line too many
        with formatter.indentation():
            for left, right in zip(entries[:half], [*entries[half:], ""][:half], strict=True):
                formatter.write(
                    f"{'':{formatter.current_indent}}{left:{width}}{right}".rstrip() + "\n"
                )
