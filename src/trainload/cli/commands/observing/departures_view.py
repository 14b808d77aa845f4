"""Show how a step departs from another execution of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainload.cli.commands.shared import out, print_json
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns

if TYPE_CHECKING:
    from trainload.launching.api.compare_compiled import CompiledComparison
    from trainload.launching.api.compare_values import StepComparison
    from trainload.packaging.package import Package

_MOST = 40


def named(module: str, operator: str = "") -> str:
    """Return a module, or a call of a function in it, for a table."""
    return " ".join(filter(None, (module or "the model", operator)))


def show_against(
    source: str | Package, against: str, data: str | None, step: int | None, as_json: bool
) -> None:
    """Compare a step with another execution, and print the result.

    Args:
        source: place of a run, or a package.
        against: "float64", "compiled", or the path of a record.
        data: rows for a package.
        step: number of the step, from 1.
        as_json: True to print JSON.
    """
    from trainload.launching.api.compare_compiled import compare_compiled
    from trainload.launching.api.compare_values import compare_step

    if against == "compiled":
        compiled = compare_compiled(source, data=data, step=step)
        if as_json:
            print_json(compiled.as_json())
        else:
            _show_compiled(compiled)
        return
    comparison = compare_step(
        source, "float64" if against == "float64" else Path(against), data=data, step=step
    )
    if as_json:
        print_json(comparison.as_json())
    else:
        _show_values(comparison)


def _show_compiled(comparison: CompiledComparison) -> None:
    departing = comparison.departing
    lines = [("step", str(comparison.step)), ("compared", f"{len(comparison.graphs)} graphs")]
    lines += [("found", str(each)) for each in departing]
    if not departing:
        lines.append(("found", "nothing: rounding explains all differences"))
    out().print(view.table(lines))
    numbers = ("distance", "explained")
    table = Columns(("graph", *numbers, "operator", "line"), title="compiled graphs", right=numbers)
    for each in comparison.graphs:
        table.add(
            each.graph,
            "" if each.distance is None else f"{each.distance:.1e}",
            f"{each.explained:.1e}",
            each.operator,
            each.place,
            style="yellow" if each.interpreted else "",
        )
    out().print(table)


def _show_values(comparison: StepComparison) -> None:
    values = comparison.values
    first = values.first
    lines = [("step", str(comparison.step)), ("against", comparison.against)]
    if not values.by_operators:
        lines.append(("compared", "results of modules and gradients: the graphs differ"))
    if first is None:
        lines.append(("found", "nothing: rounding explains all differences"))
    else:
        lines += [
            ("found", f"{first.what} departs in the {first.part} of {named(first.module)}"),
            ("distance", f"{first.distance:.2g}, where rounding explains {first.explained:.2g}"),
        ]
        if first.line:
            lines.append(("line", first.line))
    out().print(view.table(lines))
    numbers = ("distance", "explained")
    table = Columns(("value", *numbers), title="modules and gradients", right=numbers)
    # more digits in one place make many values differ: what departs is shown alone
    departing = [each for each in values.values if each.departs]
    for each in (departing or values.values)[:_MOST]:
        table.add(
            each.what,
            f"{each.distance:.1e}",
            f"{each.explained:.1e}",
            style="yellow" if each.departs else "",
        )
    more = len(departing or values.values) - _MOST
    if more > 0:
        table.add(f"and {more} more", "", "")
    out().print(table)
