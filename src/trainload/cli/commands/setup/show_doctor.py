"""The command that checks machines: doctor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from trainload.cli.commands.shared import DONE, FAILED, json_option, out, print_json, working
from trainload.cli.view.column_table import Columns

if TYPE_CHECKING:
    from trainload.launching.doctor.check_results import CheckResult, DoctorReport

_STYLES = {"fails": "red", "warning": "yellow", "not applicable": "dim"}
_MOST_NAMED = 3
_ALL, _BETWEEN = "all", "between"


@click.command(short_help="Check machines.")
@click.option(
    "--address", metavar="HOST:PORT", help="Ray cluster whose nodes are checked, or auto."
)
@click.option("--store", metavar="URL", help="Path or URL of a storage that they must reach.")
@json_option
def doctor(address: str | None, store: str | None, as_json: bool) -> int:
    """Check what this machine, or each node of a cluster, lacks for runs: software, compiler, GPUs,
    limits, disks, network; clocks, ports and bandwidth between nodes.

    Exit status: 1 if a check fails. Warnings are no failures.
    """
    from trainload.launching.api.doctor import doctor as examine

    with working("checking this machine" if address is None else "checking the cluster"):
        report = examine(address, store=store)
    if as_json:
        print_json(report.as_json())
    else:
        out().print(_table(report))
        for line in _problems(report):
            out().print(line, markup=False, highlight=False)
    return DONE if report.healthy else FAILED


def _table(report: DoctorReport) -> Columns:
    """Return a table of all results; nodes with the same result share a row."""
    several = len(report.nodes) > 1
    table = Columns(("check", "status", "found", *(["nodes"] if several else [])))
    for nodes, check in _grouped(report):
        where = [nodes] if several else []
        table.add(
            check.name, check.status, check.found, *where, style=_STYLES.get(check.status, "")
        )
    return table


def _grouped(report: DoctorReport) -> list[tuple[str, CheckResult]]:
    """Return the different results, each with the nodes that have it."""
    names: dict[str, None] = {}
    groups: dict[CheckResult, list[str]] = {}
    for node in report.nodes:
        for check in node.checks:
            names.setdefault(check.name)
            groups.setdefault(check, []).append(node.node)
    order = list(names)
    ordered = sorted(groups.items(), key=lambda group: order.index(group[0].name))
    count = len(report.nodes)
    return [
        *((_named(nodes, count), check) for check, nodes in ordered),
        *((_BETWEEN, check) for check in report.between),
    ]


def _named(nodes: list[str], count: int) -> str:
    if len(nodes) == count:
        return _ALL
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return ", ".join(nodes[:_MOST_NAMED]) + more


def _problems(report: DoctorReport) -> Iterable[str]:
    """Yield lines that say how to solve what is not ok, and a summary."""
    found = [
        (nodes, check) for nodes, check in _grouped(report) if check.status in ("fails", "warning")
    ]
    for nodes, check in sorted(found, key=lambda each: each[1].status):
        where = f" ({nodes})" if len(report.nodes) > 1 and nodes not in (_ALL, _BETWEEN) else ""
        yield ""
        yield f"{check.name}{where}: expected {check.expected}."
        yield f"  {check.hint}"
    counts = {
        status: sum(check.status == status for check in report.results)
        for status in ("ok", "warning", "fails")
    }
    yield ""
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    yield f"{counts['ok']} ok, {warnings}, {counts['fails']} failed"
