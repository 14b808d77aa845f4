"""The command that lists the settings for `--set`."""

from __future__ import annotations

import click

from trainload.cli.commands.shared import json_option, out, print_json
from trainload.cli.view.column_table import Columns


@click.command(short_help="List all settings.")
@json_option
def settings(as_json: bool) -> None:
    """List the settings that `launch`, `resume`, `evaluate` and `plan` take as --set KEY=VALUE.

    With --json: their JSON Schema.
    """
    from trainload.launching.settings.describe import descriptions, settings_schema

    if as_json:
        print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **settings_schema()})
        return
    table = Columns(("setting", "default", "unit", "resume", "description"))
    for each in descriptions():
        table.add(
            " ".join(each.names), each.default, each.unit, "" if each.at_resume else "no", each.text
        )
    out().print(table)
