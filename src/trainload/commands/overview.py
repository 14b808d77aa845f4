"""How the program's own help lists the commands: two beside each other, so that all of them fit a screen."""

from __future__ import annotations

import click

_WIDTH = 80


class Overview(click.Group):
    """A group whose help has two columns of commands, each in the order of the alphabet from top to bottom."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them. What a command says of itself is cut where it does not fit: at most 27 characters with names of 9."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        commands = [(name, command) for name, command in found if command is not None and not command.hidden]
        if not commands:
            return
        longest = max(len(name) for name, _ in commands)
        room = (_WIDTH - 2 * formatter.indent_increment - 2 * (longest + 2)) // 2
        entries = [f"{name:{longest}}  {command.get_short_help_str(room)}" for name, command in commands]
        half = -(-len(entries) // 2)
        width = longest + 2 + room + 2
        with formatter.section("Commands"):
            for left, right in zip(entries[:half], [*entries[half:], ""][:half], strict=True):
                formatter.write(f"{'':{formatter.current_indent}}{left:{width}}{right}".rstrip() + "\n")
