"""The command that finds the first bad value of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trainload.cli.commands.shared import (
    json_option,
    open_to_run,
    out,
    positive,
    print_json,
)
from trainload.cli.view import tables as view

if TYPE_CHECKING:
    from trainload.launching.api.debug_step import Diagnosis

_MOST_PARAMETERS = 5


@click.command(short_help="Find a step's first NaN.")
@click.argument("place", metavar="RUN_DIR or PKG")
@click.option("--step", type=positive, metavar="N", help="Number of the step, from 1.")
@click.option("--data", metavar="DATA", help="Rows for a package.")
@click.option(
    "--above",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Find the first value of this magnitude instead.",
)
@json_option
def debug(
    place: str, step: int | None, data: str | None, above: float | None, as_json: bool
) -> None:
    """Find the first value of a step that is not finite.

    Shows its operator, its line and module in the model's source, what it was computed from, the
    rows that cause it and the parameters that it reaches. A run's step is computed again from the
    checkpoint before it, in one process and without compiled code: by default the step at which
    the run failed, or its last one. A package is called with the rows of --data. Nothing is
    written.
    """
    from trainload.launching.api.debug_step import debug as find
    from trainload.launching.run.working_copy import has_run

    if has_run(place):
        diagnosis = find(place, data=data, step=step, above=above)
    else:
        diagnosis = find(open_to_run(place), data=data, step=step, above=above)
    if as_json:
        print_json(diagnosis.as_json())
        return
    out().print(view.table(_lines(diagnosis)))


def _lines(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    computed = diagnosis.step - 1 - diagnosis.began
    before = f", after {computed} steps from step {diagnosis.began}" if computed else ""
    lines = [("step", f"{diagnosis.step}{before}")]
    for name, value in (("loss", diagnosis.loss), ("gradient's norm", diagnosis.gradient_norm)):
        if value is not None:
            lines.append((name, f"{value:.6g}"))
    finding = diagnosis.finding
    if finding is None:
        return [*lines, ("found", "nothing: no bad value reaches a result")]
    found = finding.sighting
    lines.append(("found", finding.what))
    if found.part != "input":
        module = found.module or "the model or the loss"
        lines.append(("in", found.part if found.part == "update" else f"{found.part} of {module}"))
    if found.line:
        lines.append(("line", found.line))
    if found.rows:
        lines.append(("rows", f"{', '.join(map(str, found.rows))} of {found.source}"))
    lines += [("input", str(facts)) for facts in found.inputs]
    lines.append(("result", str(found.result).removeprefix("result: ")))
    if finding.parameters:
        names = ", ".join(finding.parameters[:_MOST_PARAMETERS])
        more = len(finding.parameters) - _MOST_PARAMETERS
        lines.append(("reaches", names + (f" and {more} more parameters" if more > 0 else "")))
    return lines
