"""Commands about a line of releases: history, lineage, rollback and migration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.tree import Tree

from trainload.cli.commands import shared
from trainload.cli.commands.shared import LocalPath, Place, json_option, out, print_json
from trainload.cli.commands.store_commands import (
    announce_pointer,
    line_option,
    retraining_of,
    retraining_option,
    store_argument,
)
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns, Pairs
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.retraining.ticks.lineage import Ancestor, LineStory

_SHORT = 12


@click.command(short_help="Return to a release.")
@store_argument
@line_option
@click.option("--to", metavar="N", help="Release to return to. Default: the previous.")
@click.option("--reason", metavar="TEXT", default="", help="Reason, stored in the history.")
@retraining_option
@json_option
def rollback(
    store: str,
    line: str | None,
    to: str | None,
    reason: str,
    retraining: str | None,
    as_json: bool,
) -> None:
    """Make the previously current release current again, and mark the one that it replaces as
    rejected.
    """
    check_supported_torch()
    from trainload.packaging.stores.releases import shown
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.lineage import rollback as go_back

    place = Store(store)
    config = retraining_of(retraining, store, line)
    pointer = go_back(place, place.line(line), to=to, reason=reason)
    problems = announce_pointer(config, pointer)
    record = {
        "store": store,
        "line": pointer.line,
        "release": shown(pointer.release),
        "digest": pointer.package,
        "reason": pointer.reason,
        **problems,
    }
    if as_json:
        print_json(record)
    else:
        out().print(
            view.table(
                [
                    ("line", pointer.line),
                    ("current", shown(pointer.release)),
                    ("reason", pointer.reason),
                ]
            )
        )


@click.command(short_help="Show a line's history.")
@store_argument
@line_option
@json_option
def history(store: str, line: str | None, as_json: bool) -> None:
    """Show which releases were current and the outcomes of ticks, in chronological order."""
    check_supported_torch()
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.lineage import read_line

    place = Store(store)
    story = read_line(place, place.line(line))
    rows = _history_rows(story)
    if as_json:
        print_json({"store": store, "line": story.line, "history": rows})
        return
    table = Columns(("time", "tick", "what", "release", "reason"), title=f"line {story.line}")
    for row in rows:
        table.add(row["time"], row["tick"] or "", row["what"], row["release"] or "", row["reason"])
    out().print(table)


def _history_rows(story: LineStory) -> list[dict[str, Any]]:
    """Return every change of the current release, and every tick, in chronological order.

    A promotion by a tick occurs once, as part of the tick.
    """
    from trainload.packaging.stores.releases import shown

    by_tick = {
        tick.ended.pointer
        for tick in story.ticks
        if tick.ended is not None and tick.ended.pointer is not None
    }
    rows = [
        {
            "time": entry.created,
            "tick": None,
            "what": "current",
            "release": shown(entry.release),
            "reason": entry.reason,
        }
        for entry in story.changes
        if entry.id not in by_tick
    ]
    for tick in story.ticks:
        ended, pinned = tick.ended, tick.pinned
        release = tick.trained.release if tick.trained is not None else None
        rows.append(
            {
                "time": (
                    ended.created
                    if ended is not None
                    else pinned.created
                    if pinned is not None
                    else ""
                ),
                "tick": tick.name,
                "what": ended.outcome if ended is not None else "under way",
                "release": None if release is None else shown(release),
                "reason": ended.reason if ended is not None else f"started {tick.begun} times",
            }
        )
    return sorted(rows, key=lambda row: (row["time"] or "", row["tick"] or ""))


@click.command(short_help="Show its ancestors.")
@click.argument("release", metavar="STORE[#LINE[/N]]", type=Place())
@json_option
def lineage(release: str, as_json: bool) -> None:
    """Show the lineage of a release, back to the first freeze: parents, data, plan, metrics,
    decisions.
    """
    check_supported_torch()
    from trainload.packaging.stores.references import parts_of
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.lineage import ancestry
    from trainload.retraining.ticks.lineage import as_json as lineage_json

    url, line, number = parts_of(release)
    place = Store(url)
    ancestors = ancestry(place, place.line(line), number)
    if as_json:
        print_json({"store": place.url, "lineage": lineage_json(ancestors)})
        return
    tree: Tree | None = None
    top: Tree | None = None
    for step in ancestors:
        node = Tree(_describe(step)) if tree is None else tree.add(_describe(step))
        top, tree = top or node, node
    assert top is not None, "a release is its own first ancestor"
    out().print(top)


def _describe(step: Ancestor) -> Pairs:
    """Describe a step of a lineage."""
    from trainload.retraining.ticks.lineage import metrics_of

    release, tick = step.state.release, step.tick
    rows: list[tuple[str, Any]] = [
        (
            f"{step.line} {release.name}",
            f"{step.state.status}, {step.how} {release.created}"
            + (f": {release.message}" if release.message else ""),
        ),
        ("package", release.package[:_SHORT]),
        ("program", release.program[:_SHORT]),
        ("weights", release.weights[:_SHORT]),
    ]
    if tick is not None:
        if tick.taken is not None:
            snapshot = tick.taken.snapshot
            rows.append(("data", f"{snapshot.rows:,} rows of {len(snapshot.files)} files"))
        if tick.trained is not None:
            plan = ", ".join(f"{name} {value}" for name, value in sorted(tick.trained.plan.items()))
            rows.append(
                ("trained", f"{tick.trained.steps} steps, {plan}; started {tick.begun} times")
            )
        for name, both in metrics_of(tick).items():
            rows.append(
                (
                    name,
                    f"{_format_number(both['champion'])} -> {_format_number(both['challenger'])}",
                )
            )
        if tick.ended is not None:
            rows.append((tick.ended.outcome, tick.ended.reason))
        if tick.pinned is not None:
            rows.append(
                (
                    "versions",
                    ", ".join(
                        f"{name} {value}" for name, value in sorted(tick.pinned.versions.items())
                    ),
                )
            )
    return view.table(rows)


def _format_number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.6g}"


@click.command(short_help="Fit weights to new code.")
@click.argument("package", metavar="NEW", type=Place())
@click.option(
    "--from",
    "source",
    required=True,
    metavar="OLD",
    help="Package or STORE#LINE/N with the weights.",
)
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="PKG",
    help="Path of the new package.",
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="Rename parameters; one * may match.",
)
@click.option("--overlap", is_flag=True, help="Copy the overlap of different shapes.")
@click.option("--strict", is_flag=True, help="Fail unless everything is carried over.")
@click.option("--store", type=Place(), metavar="STORE", help="Publish to this store; with --line.")
@click.option("--line", metavar="NAME", help="Name of the new line.")
@json_option
def migrate(
    package: str,
    source: str,
    output: Path | None,
    renames: tuple[str, ...],
    overlap: bool,
    strict: bool,
    store: str | None,
    line: str | None,
    as_json: bool,
) -> None:
    """Write the program of NEW with the weights of OLD, matched by name, and report the outcome for
    each.

    With --store and --line the result becomes the first release of a new line, whose lineage
    continues in that of OLD.
    """
    if (store is None) != (line is None):
        raise click.UsageError("--store and --line must be used together.")
    if output is None and store is None:
        raise click.UsageError("Pass --output, or --store and --line.")
    check_supported_torch()
    from trainload.retraining.migrate import migrate as carry_over
    from trainload.retraining.migrate import written_to

    rename = dict(_parse_rename(text) for text in renames)
    new, old = shared.open_to_run(package), shared.open_to_run(source)
    with written_to(output) as path:
        with shared.working("moving the weights"):
            migration = carry_over(new, old, path, rename=rename, overlap=overlap, strict=strict)
        release = None
        if store is not None and line is not None:
            from trainload.retraining.migrate import publish

            release = publish(migration, old, store, line)
    summary = {
        "release": release,
        "package": None if output is None else str(output),
        "digest": migration.digest,
    }
    lists = {
        name: getattr(migration, name)
        for name in ("matched", "converted", "reshaped", "missing", "left")
    }
    if as_json:
        print_json(
            {**summary, **lists, "elements": migration.elements, "carried": migration.carried}
        )
        return
    rows: list[tuple[str, Any]] = [
        (name, value) for name, value in summary.items() if value is not None
    ]
    rows += [(name, len(each)) for name, each in lists.items()]
    rows.append(
        (
            "carried over",
            (
                f"{migration.carried:,} of {migration.elements:,} elements"
                f" ({migration.carried / max(1, migration.elements):.1%})"
            ),
        )
    )
    out().print(view.table(rows))
    for each in migration.reshaped:
        how = (
            "the part that both have was carried over"
            if each.copied
            else "the new program's own values"
        )
        out().print(
            f"reshaped: {each.name}: {list(each.old)} -> {list(each.new)}: {how}", highlight=False
        )
    for name in migration.missing:
        out().print(f"missing: {name}: the new program's own values", highlight=False)
    for name in migration.left:
        out().print(f"left: {name}", highlight=False)


def _parse_rename(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old or not new:
        raise click.UsageError(f"--rename {text}: expected OLD=NEW.")
    return old, new
