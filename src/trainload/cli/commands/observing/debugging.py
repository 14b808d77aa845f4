"""The command that finds the first bad value of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainload.cli.commands.observing.departures_view import named, show_against
from trainload.cli.commands.shared import (
    LocalPath,
    Place,
    err,
    json_option,
    open_to_run,
    out,
    positive,
    print_json,
)
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns

if TYPE_CHECKING:
    from trainload.launching.api.compare_steps import RunComparison
    from trainload.launching.api.debug_step import Diagnosis
    from trainload.launching.debugging.statistics import Statistics

_MOST_PARAMETERS = 5
_MOST_MODULES = 12
_ALONE = 0.99
"""Part of a parameter's difference from which one element is said to differ alone."""


@click.command(short_help="Find a step's first NaN.")
@click.argument("place", metavar="RUN_DIR or PKG", type=Place())
@click.option("--step", type=positive, metavar="N", help="Number of the step, from 1.")
@click.option("--data", type=Place(), metavar="DATA", help="Rows for a package.")
@click.option(
    "--above",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Find the first value of this magnitude instead.",
)
@click.option("--statistics", is_flag=True, help="Show activations and updates by module.")
@click.option("--compare", is_flag=True, help="Find where a run departs from its steps.")
@click.option(
    "--against",
    metavar="WITH",
    help="Find where a step departs from float64, compiled, or a file of --record.",
)
@click.option(
    "--record", type=LocalPath(), metavar="FILE", help="Record a step's values for --against."
)
@json_option
def debug(
    place: str,
    step: int | None,
    data: str | None,
    above: float | None,
    statistics: bool,
    compare: bool,
    against: str | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Find the first value of a step that is not finite.

    Shows its operator, its line and module in the model's source, what it was computed from, the
    rows that cause it and the parameters that it reaches. A run's step is computed again from the
    checkpoint before it, in one process and without compiled code: by default the step at which
    the run failed, or its last one. A package is called with the rows of --data. With --compare,
    the steps of a run from --step on (default: 1) are computed again, and their losses, sampled
    statistics and checkpoints compared with the run's. With --against, a step is computed another
    time in float64 or compiled, or compared with a record of another machine. Only --record writes
    anything.
    """
    modes = [compare, against is not None, record is not None, statistics or above is not None]
    if sum(modes) > 1:
        raise click.UsageError(
            "--compare, --against, --record, and --statistics or --above exclude each other."
        )
    if compare:
        if data is not None:
            raise click.UsageError("--compare needs a run, which has its own data.")
        _compare(place, step or 1, as_json)
        return
    from trainload.launching.run.working_copy import has_run

    source = place if has_run(place) else open_to_run(place)
    if against is not None:
        show_against(source, against, data, step, as_json)
        return
    if record is not None:
        from trainload.launching.api.compare_values import record_step

        record_step(source, record, data=data, step=step)
        if as_json:
            print_json({"values": record})
        else:
            err().print(f"The values are recorded in {record}.")
        return
    from trainload.launching.api.debug_step import debug as find

    diagnosis = find(source, data=data, step=step, above=above, statistics=statistics)
    if as_json:
        print_json(diagnosis.as_json())
        return
    out().print(view.table(_lines(diagnosis)))
    if diagnosis.statistics is not None:
        out().print(_activations(diagnosis.statistics))
        out().print(_parameters(diagnosis.statistics))


def _compare(place: str, step: int, as_json: bool) -> None:
    from trainload.launching.api.compare_steps import compare_run

    comparison = compare_run(place, step=step)
    if as_json:
        print_json(comparison.as_json())
        return
    departure = comparison.departure
    lines = [
        ("compared", f"{comparison.steps} steps, from step {comparison.began + 1} on"),
        ("rounding", f"losses differ by up to {comparison.greatest:.1e}"),
    ]
    if departure is None and comparison.checkpoint is None and not comparison.modules:
        lines.append(("found", "nothing: the run equals its steps"))
    if departure is not None:
        lines += [
            ("found", f"the run departs at step {departure.step}"),
            ("its loss", f"{departure.recorded:.8g}"),
            ("computed again", f"{departure.computed:.8g}"),
        ]
    if comparison.unequal:
        lines.append(("warned", comparison.unequal))
    if comparison.modules:
        first = comparison.modules[0]
        lines += [
            ("found", f"{named(first.module, first.operator)} departs at step {first.step}"),
            ("line", first.line),
        ]
    out().print(view.table(lines))
    if comparison.modules:
        out().print(_modules(comparison))
    if comparison.parameters:
        out().print(_differences(comparison))


def _modules(comparison: RunComparison) -> Columns:
    numbers = ("recorded", "computed")
    title = f"statistics of step {comparison.modules[0].step}"
    table = Columns(("module", "measure", *numbers), title=title, right=numbers)
    for each in comparison.modules[:_MOST_MODULES]:
        table.add(
            named(each.module, each.operator),
            each.measure,
            f"{each.recorded:.4g}",
            f"{each.computed:.4g}",
        )
    return table


def _differences(comparison: RunComparison) -> Columns:
    numbers = ("difference", "recorded", "computed")
    title = f"parameters of the checkpoint of step {comparison.checkpoint}"
    table = Columns(
        ("parameter", "difference", "element", "recorded", "computed"), title=title, right=numbers
    )
    for each in comparison.parameters[:_MOST_PARAMETERS]:
        alone = " alone" if each.share > _ALONE else ""
        table.add(
            each.parameter,
            f"{each.relative:.2g}",
            f"{list(each.element)}{alone}",
            f"{each.recorded:.6g}",
            f"{each.computed:.6g}",
        )
    return table


def _activations(statistics: Statistics) -> Columns:
    numbers = ("rms", "greatest", "zeros", "dead", "saturated")
    table = Columns(("module", *numbers, "note"), title="activations", right=numbers)
    for each in statistics.activations:
        table.add(
            named(each.module, each.operator),
            f"{each.rms:.3g}",
            f"{each.greatest:.3g}",
            _percent(each.zeros),
            "" if each.dead is None else _percent(each.dead),
            "" if each.saturated is None else _percent(each.saturated),
            each.note,
            style="yellow" if each.note else "",
        )
    return table


def _parameters(statistics: Statistics) -> Columns:
    numbers = ("norm", "gradient", "update", "ratio")
    table = Columns(("parameter", *numbers, "note"), title="parameters", right=numbers)
    for each in statistics.parameters:
        table.add(
            each.parameter,
            f"{each.norm:.3g}",
            "" if each.gradient is None else f"{each.gradient:.3g}",
            "" if each.update is None else f"{each.update:.3g}",
            "" if each.ratio is None else f"{each.ratio:.2g}",
            each.note,
            style="yellow" if each.note else "",
        )
    return table


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}%" if fraction else ""


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
