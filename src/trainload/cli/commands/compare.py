"""Commands that compare packages: diff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from trainload.cli.commands.shared import FAILED, LocalPath, json_option, out, print_json, working
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns
from trainload.core.errors import PackageError
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.packaging.comparison.graph_difference import GraphDifference
    from trainload.packaging.comparison.json_change import Change
    from trainload.packaging.comparison.package_difference import PackageDifference, Section
    from trainload.packaging.comparison.weight_distance import TensorDifference

MOST_LINES = 20
"""Maximum number of lines of a section, module or text without --full."""
FILES = "files"
"""The section of `package_difference` that lists them."""
_package = LocalPath()


@click.command(short_help="Compare two packages.")
@click.argument("before", metavar="A", type=_package)
@click.argument("after", metavar="B", type=_package)
@click.option(
    "--weights",
    "rows",
    type=click.IntRange(min=0),
    default=10,
    metavar="N",
    help="Number of tensors to list. Default: 10.",
)
@click.option("--no-weights", is_flag=True, help="Do not compare weights.")
@click.option("--full", is_flag=True, help=f"Print all lines, not {MOST_LINES} of each part.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the packages differ.")
@json_option
def diff(
    before: Path,
    after: Path,
    rows: int,
    no_weights: bool,
    full: bool,
    exit_code: bool,
    as_json: bool,
) -> None:
    """Show the differences between packages A and B, by name.

    "-" is only in A, "+" only in B. Weights are listed with the greatest change first. Files that
    are not part of the identity (debug/, derived/, signatures/) are not compared. No code of a
    package is run, and its operators need not be installed.
    """
    for path in (before, after):
        if not path.exists():
            raise PackageError("there is no such package", where=str(path))
    check_supported_torch()
    from trainload.publishing import trust

    with working("comparing"):
        difference = trust.diff(before, after, weights=not no_weights)
    if as_json:
        print_json({"same": difference.same, **view.as_json(difference)})
    elif difference.same:
        out().print(
            f"no differences: both are {difference.before.digest}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    else:
        _print_difference(difference, rows, None if full else MOST_LINES)
    if exit_code and not difference.same:
        raise click.exceptions.Exit(FAILED)


def _print_difference(difference: PackageDifference, rows: int, most: int | None) -> None:
    sides = [
        (name, f"{side.path}  {side.digest}")
        for name, side in (("A", difference.before), ("B", difference.after))
    ]
    if difference.before.program == difference.after.program:
        sides.append(("program", "the same"))
    out().print(view.table([*sides, ("relation", difference.relation)]))
    for section in difference.sections:
        if section.title != FILES:
            _print_section(section, most)
    for text in difference.texts:
        _print_title(text.file)
        _print_lines([(line, _STYLES.get(line[:1], "")) for line in text.lines], most)
    for graph in difference.graphs:
        _print_graph(graph, most)
    _print_weights(difference, rows)
    for section in difference.sections:
        if section.title == FILES:  # last, since the lines above describe their contents
            _print_section(section, most)


def _print_section(section: Section, most: int | None) -> None:
    _print_title(section.title, len(section.changes))
    _print_lines([line for change in section.changes for line in _change(change)], most)


def _print_graph(graph: GraphDifference, most: int | None) -> None:
    _print_title(f"graph {graph.name}")
    _print_lines([line for change in graph.operators for line in _change(change)], most)
    for module in graph.modules:
        _print_lines([(f"  in {module.module or 'the model or the loss'}:", "dim")], None)
        _print_lines(
            [(f"  {line.mark} {line.text}", _STYLES[line.mark]) for line in module.lines], most
        )
    if graph.values:
        _print_lines([("  other sizes:", "dim")], None)
        _print_lines(
            [
                (f"  ~ {change.name}: {change.before} -> {change.after}", "yellow")
                for change in graph.values
            ],
            most,
        )
    if graph.unseen:
        _print_lines(
            [("  other names, strides or order: no operator, argument or size", "dim")], None
        )


def _print_weights(difference: PackageDifference, rows: int) -> None:
    tensors = difference.weights or ()
    _print_title("weights", len(tensors) if tensors else None)
    if difference.weights_note:
        _print_lines([(f"  {difference.weights_note}", "dim")], None)
    if not tensors or not rows:
        return
    numbers = ("changed", "greatest", "relative RMS", "not finite")
    table = Columns(("tensor", "shape", *numbers), right=numbers)
    for tensor in tensors[:rows]:
        table.add(*_row(tensor))
    out().print(table)
    if len(tensors) > rows:
        _print_lines([(f"  and {len(tensors) - rows} more", "dim")], None)


def _row(tensor: TensorDifference) -> Sequence[str]:
    before, after = tensor.not_finite
    return (
        tensor.name,
        f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]",
        f"{100 * tensor.changed / max(1, tensor.elements):.3g}%",
        f"{tensor.greatest:.3g}",
        "all were 0" if tensor.relative is None else f"{tensor.relative:.3g}",
        f"{before} -> {after}" if before or after else "",
    )


LISTED = "listed"
"""Value in `changes` for an entry of a list, which has only a name."""
_STYLES = {"-": "red", "+": "green", "@": "cyan"}


def _change(change: Change) -> Iterable[tuple[str, str]]:
    if change.before is not None and change.after is not None:
        yield f"  ~ {change.name}: {change.before} -> {change.after}", "yellow"
    else:
        mark, value = ("-", change.before) if change.after is None else ("+", change.after)
        yield f"  {mark} {change.name}" + ("" if value == LISTED else f": {value}"), _STYLES[mark]


def _print_title(text: str, count: int | None = None) -> None:
    out().print(
        Text(_printable(text if count is None else f"{text} ({count})"), style="bold"),
        soft_wrap=True,
    )


def _print_lines(lines: Sequence[tuple[str, str]], most: int | None) -> None:
    visible = lines if most is None or len(lines) <= most + 1 else lines[:most]
    for text, style in visible:
        out().print(Text(_printable(text), style=style), soft_wrap=True)
    if len(visible) < len(lines):
        out().print(
            Text(f"    and {len(lines) - len(visible)} more lines: --full", style="dim"),
            soft_wrap=True,
        )


def _printable(text: str) -> str:
    """Return untrusted text without control sequences of a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
