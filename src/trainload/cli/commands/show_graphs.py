"""Commands that show and rewrite the graphs of a package: show, ops, transform."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from trainload.cli.commands import shared
from trainload.cli.commands.shared import (
    FAILED,
    LocalPath,
    OneOf,
    err,
    json_option,
    new_package_option,
    out,
    package_argument,
    print_json,
)
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns
from trainload.core.errors import PackageError
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.packaging.package import Package
    from trainload.transforms.apply import Applied, Transformation
    from trainload.transforms.operator_sets import OperatorUse

data_option = click.option("--data", metavar="PATH", help="Rows to compare on. Default: generated.")
allow_option = click.option(
    "--allow-change", is_flag=True, help="Accept changed values, and record them."
)


@click.command(short_help="Show module graphs.")
@package_argument
@click.option(
    "--module", default="", metavar="PATH", help="Module, such as layers.3. Default: all."
)
@click.option("--graph", metavar="NAME", help="Graph. Default: the main training graph.")
@json_option
def show(package: Path, module: str, graph: str | None, as_json: bool) -> None:
    """Show the graph of a module: its nodes next to its source lines.

    Files and line numbers are shown if the source is available and unchanged; otherwise the lines
    at the time of the freeze.
    """
    opened = shared.open_package(package)
    from trainload.transforms.listing import module_lines

    lines = module_lines(opened, graph or opened.recipe.main, module)
    if as_json:
        print_json(lines)
        return
    table = Columns(("node", "source"))
    before = Text("")
    for line in lines:
        place = f"{line.file}:{line.line}\n" if line.file is not None else ""
        source = Text.assemble((place, "dim"), line.source)
        table.add(line.text, source if source != before else "")
        before = source
    out().print(table)


@click.command(short_help="Apply graph passes.")
@package_argument
@click.option(
    "--pass",
    "specs",
    multiple=True,
    required=True,
    metavar="MODULE:FUNCTION[,NAME=VALUE...]",
    help="Pass to apply; may be repeated.",
)
@new_package_option
@allow_option
@data_option
@json_option
def transform(
    package: Path,
    specs: tuple[str, ...],
    output: Path,
    allow_change: bool,
    data: str | None,
    as_json: bool,
) -> None:
    """Apply passes to a package's graphs; write a new package.

    A pass is your own code; MODULE may be a file. After each pass, loss, metrics, buffers and every
    gradient are compared with those before it, and a pass that changes them is rejected.
    """
    opened = shared.open_package(package)
    from trainload.passes import load_pass
    from trainload.transforms.apply import transform as apply

    applied_passes: list[Applied] = []
    # a pass may print
    with redirect_stdout(sys.stderr), shared.working("applying the passes"):
        child = apply(
            opened,
            [load_pass(spec) for spec in specs],
            output,
            allow_change=allow_change,
            data=data,
            on_pass=applied_passes.append,
        )
    if as_json:
        print_json(
            {
                "package": output,
                "digest": child.digest,
                "passes": [_pass_record(applied) for applied in applied_passes],
            }
        )
        return
    for applied in applied_passes:
        out().print(view.table(_effect_rows(applied), title=applied.entry.name))
    out().print(view.table([("package", str(output)), ("digest", child.digest)]))


@click.command(short_help="List its operators.")
@package_argument
@click.option(
    "--set", "operator_set", metavar="full|core|FILE", help="Operator set to decompose to."
)
@click.option("--interactive", is_flag=True, help="Choose operators one by one.")
@click.option("--compat", is_flag=True, help="Compare operators with the installed torch.")
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="PKG",
    help="Path of the new package.",
)
@allow_option
@data_option
@json_option
def ops(
    package: Path,
    operator_set: str | None,
    interactive: bool,
    compat: bool,
    output: Path | None,
    allow_change: bool,
    data: str | None,
    as_json: bool,
) -> None:
    """List the operators of a package's graphs, or choose a set of them.

    full: as captured. core: decompose to core ATen where torch can. FILE: decompose the operators
    that it names, one per line. The resulting graphs are compared with the original ones.

    --compat also works for packages that cannot be opened. It exits with 1 if graphs cannot run.
    """
    if compat and (operator_set is not None or interactive or output is not None):
        raise click.UsageError("--compat only compares: omit --set, --interactive and -o.")
    if compat:
        _compare(package, as_json)
        return
    if interactive and operator_set is not None:
        raise click.UsageError("--interactive chooses the set: omit --set.")
    if output is not None and operator_set is None and not interactive:
        raise click.UsageError(
            "-o writes a package with a chosen set: pass --set or --interactive."
        )
    opened = shared.open_package(package)
    from trainload.packaging.format.package_files import check_new_folder

    if output is not None:
        check_new_folder(output)
    if operator_set is None and not interactive:
        _list(opened, as_json)
    else:
        _choose(opened, operator_set, output, allow_change, data, as_json)


def _compare(path: Path, as_json: bool) -> None:
    """Print the state of the package's operators in the installed torch."""
    if not path.exists():
        raise PackageError("there is no such package", where=str(path))
    check_supported_torch()
    import torch

    from trainload.launching.node.libraries import import_for
    from trainload.packaging.format.manifest import Manifest
    from trainload.packaging.format.package_paths import MANIFEST
    from trainload.packaging.graphs.operator_compat import Verdict, compare_operators
    from trainload.packaging.package import read_manifest, told_library, ways_to_allow

    allowed = import_for(path, shared.libraries(), trust_extensions=shared.trusts_extensions())
    manifest = Manifest.from_bytes(read_manifest(path), MANIFEST)
    compared = compare_operators(manifest)
    counts = {
        verdict.value: sum(each.verdict is verdict for each in compared) for verdict in Verdict
    }
    rows = [each for each in compared if each.verdict is not Verdict.SAME]
    strange = {
        namespace: entry
        for namespace, entry in manifest.op_libraries.items()
        if namespace not in allowed
    }
    if as_json:
        print_json(
            {
                "torch": torch.__version__,
                "counts": counts,
                "operators": rows,
                "libraries_not_allowed": strange,
            }
        )
    else:
        table = Columns(("operator", "was", "is", "verdict"))
        for each in rows:
            name = each.name.removeprefix("torch.ops.")
            table.add(name, each.was, each.now or "", each.verdict.value)
        if rows:
            out().print(table)
        library_rows = [
            (
                "not imported",
                f"{name}, from {told_library(e)}. If you trust it, {ways_to_allow(name, e)}",
            )
            for name, e in strange.items()
        ]
        out().print(view.table([("torch", torch.__version__), *counts.items(), *library_rows]))
    if not all(each.fits for each in compared):
        raise click.exceptions.Exit(FAILED)


def _list(package: Package, as_json: bool) -> None:
    from trainload.transforms.operator_sets import STEP, UPDATE, operator_uses

    uses = operator_uses(package)
    if as_json:
        print_json({"operators": uses, "passes": package.manifest.passes})
        return
    graphs = [*package.manifest.graphs, UPDATE, STEP]
    table = Columns(("operator", *graphs, "core", "becomes"), right=graphs)
    for use in uses:
        name = Text.assemble(
            use.name, (" " + use.schema.partition("(")[1] + use.schema.partition("(")[2], "dim")
        )
        core = "" if use.core is None else "yes" if use.core else "no"
        counts = [str(use.counts.get(graph, "")) for graph in graphs]
        table.add(
            name, *counts, core + (" device" if use.device_specific else ""), ", ".join(use.becomes)
        )
    out().print(table)
    out().print(view.table(_summary_rows(uses)))


def _summary_rows(uses: tuple[OperatorUse, ...]) -> list[tuple[str, Any]]:
    return [
        ("operators", len(uses)),
        ("outside core ATen", sum(use.core is False for use in uses)),
        ("that can be decomposed", sum(bool(use.becomes) for use in uses)),
        ("device-specific", ", ".join(use.name for use in uses if use.device_specific) or "none"),
    ]


def _choose(
    package: Package,
    operator_set: str | None,
    output: Path | None,
    allow_change: bool,
    data: str | None,
    as_json: bool,
) -> None:
    from trainload.transforms.apply import Transformation
    from trainload.transforms.operator_sets import counts_of, outside_core

    work = Transformation(package, data)
    before = counts_of(work.program)
    applied = (
        _ask_user(work, allow_change)
        if operator_set is None
        else _apply_set(work, operator_set, allow_change)
    )
    with shared.working("writing the package"):
        child = work.write(output) if output is not None else None
    after, remaining = counts_of(work.program), outside_core(work.program)
    changed = {
        name: (before.get(name, 0), after.get(name, 0)) for name in sorted({*before, *after})
    }
    if as_json:
        print_json(
            {
                "counts": {
                    name: {"before": was, "after": now} for name, (was, now) in changed.items()
                },
                "outside_core": remaining,
                "passes": [_pass_record(one) for one in applied],
                "package": output,
                "digest": child.digest if child is not None else None,
            }
        )
        return
    table = Columns(("operator", "before", "after"), right={"before", "after"})
    for name, (was, now) in changed.items():
        table.add(name, str(was), str(now), style="" if was == now else "bold")
    table.add("all calls", str(sum(before.values())), str(sum(after.values())))
    out().print(table)
    rows: list[tuple[str, Any]] = [("left outside core ATen", ", ".join(remaining) or "none")]
    rows += [row for one in applied for row in _effect_rows(one)[1:]]
    if child is not None:
        rows += [("package", str(output)), ("digest", child.digest)]
    out().print(view.table(rows))


def _apply_set(work: Transformation, operator_set: str, allow_change: bool) -> list[Applied]:
    from trainload.passes import decompose
    from trainload.transforms.operator_sets import read_operator_file

    if operator_set == "full":
        return []
    names = "core" if operator_set == "core" else read_operator_file(Path(operator_set))
    with shared.working("decomposing, and comparing the graphs"):
        applied = work.apply(decompose, {"operators": names})
    work.keep(applied, allow_change=allow_change)
    return [applied]


def _ask_user(work: Transformation, allow_change: bool) -> list[Applied]:
    """Offer operators that can be decomposed, the most used first, until none is left or the user
    stops.
    """
    from trainload.autograd_trace.derivation.decompose import becomes, spelled
    from trainload.capture.operators import calls_in
    from trainload.passes import decompose
    from trainload.transforms.operator_sets import counts_of

    accepted: list[Applied] = []
    asked: set[str] = set()
    while True:
        into: dict[str, tuple[str, ...]] = {}
        for graph in work.program.graphs.values():
            for node in calls_in(graph.exported.graph_module):
                if (
                    spelled(node.target) not in asked
                    and spelled(node.target) not in into
                    and (parts := becomes(node))
                ):
                    into[spelled(node.target)] = parts
        if not into:
            return accepted
        counts = counts_of(work.program)
        name = min(into, key=lambda one: (-counts[one], one))
        asked.add(name)
        click.echo(f"{name}, {counts[name]} calls, becomes {', '.join(into[name])}", err=True)
        answer = click.prompt("decompose it?", type=OneOf(["y", "n", "q"]), default="n", err=True)
        if answer == "q":
            return accepted
        if answer == "n":
            continue
        applied = work.apply(decompose, {"operators": (name,)})
        err().print(view.table(_effect_rows(applied)[1:]))
        if not applied.entry.preserving and not allow_change:
            click.echo(
                "It changes the results, so it is not kept. Use --allow-change to accept changes.",
                err=True,
            )
        elif click.confirm("keep it?", default=True, err=True):
            work.keep(applied, allow_change=allow_change)
            accepted.append(applied)


def _effect_rows(applied: Applied) -> list[tuple[str, Any]]:
    worst = applied.worst
    parity = (
        "bit for bit"
        if worst.distance == 0
        else f"{worst.distance:.2g} in the {worst.graph} graph's {worst.value}"
    )
    return [
        (
            "options",
            ", ".join(f"{key} = {value}" for key, value in applied.entry.options.items()) or "none",
        ),
        ("calls", f"{applied.calls_before} before, {applied.calls_after} after"),
        (
            "parity",
            f"{parity}; at most {worst.tolerance:g}"
            + ("" if applied.entry.preserving else ": changed"),
        ),
    ]


def _pass_record(applied: Applied) -> dict[str, Any]:
    return {
        "pass": applied.entry,
        "differences": applied.differences,
        "calls_before": applied.calls_before,
        "calls_after": applied.calls_after,
    }
