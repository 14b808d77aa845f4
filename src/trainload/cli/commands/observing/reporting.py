"""Commands that show runs in a browser or in Grafana."""

from __future__ import annotations

import time
from pathlib import Path

import click

from trainload.cli.commands import shared
from trainload.cli.commands.page_files import check_libraries, check_page_path, write_page
from trainload.cli.commands.shared import (
    LocalPath,
    Place,
    json_option,
    out,
    print_json,
    show_record,
    write_text,
)
from trainload.cli.view import tables as view
from trainload.core.errors import StorageError
from trainload.core.storage.places import is_url, local_path
from trainload.launching.run.run_place import place_name, url_of

_FILE = "report.html"


@click.command(short_help="Make a page of a run.")
@click.argument("place", metavar="RUN_DIR, PKG or STORE[#LINE]", type=Place())
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="Path of the page. Default: report.html.",
)
@click.option(
    "--plan",
    "plan_file",
    type=LocalPath(),
    metavar="FILE",
    help="Plan of the package: show what it shards and recomputes.",
)
@json_option
def report(place: str, output: Path | None, plan_file: Path | None, as_json: bool) -> None:
    """Write an HTML page of a run, of a package, or of a store's releases and ticks, as one file.

    For a run: its configuration, curves, failures and timeline, read from its folder, also while it
    runs. For a package: its modules as a tree, with sizes and operations, and the operators beside
    their source lines. For a store: the current release, its lineage, and metrics over ticks. The
    page needs no network.
    """
    from trainload.launching.run.run_directory import RUN_FILE
    from trainload.launching.run.working_copy import has_run, viewed
    from trainload.packaging.format.package_paths import MANIFEST

    is_local = "#" not in place and not is_url(place)
    if is_local and (local_path(place) / MANIFEST).is_file():
        _report_package(local_path(place), plan_file, output, as_json)
        return
    if plan_file is not None:
        raise click.UsageError("--plan is for the page of a package: pass a package's folder.")
    if "#" in place or (
        not has_run(place) if is_url(place) else (local_path(place) / "store.json").is_file()
    ):
        _report_store(place, output, as_json)
        return
    with viewed(place) as files:
        if not (files.folder / RUN_FILE).exists():
            raise StorageError(
                "there is no such run",
                where=place,
                hint="Pass what was passed to `trainload launch --run-dir`, or a package's folder.",
            )
        _report_run(files.folder, output, as_json)


def _report_package(
    package: Path, plan_file: Path | None, output: Path | None, as_json: bool
) -> None:
    """Write the page about a package."""
    from trainload.sharding.plans.plan import read_plan

    check_libraries()
    from trainload.report.packages.graph_page import package_page

    path = output or Path(_FILE)
    check_page_path(path)
    plan = None if plan_file is None else read_plan(plan_file)
    opened = shared.open_package(package)
    with shared.working("deriving the training graphs"):
        page, graphs = package_page(opened, plan)
    text = page.encode()
    write_page(path, text)
    if as_json:
        told = {"package": package, "digest": opened.digest, "report": path, "bytes": len(text)}
        print_json({**told, "graphs": graphs})
        return
    rows = [
        (name, f"{each['operators']} operators, {each['modules']} modules")
        for name, each in graphs.items()
    ]
    out().print(view.table([("report", str(path)), ("bytes", len(text)), *rows]))


def _report_run(run_dir: Path, output: Path | None, as_json: bool) -> None:
    """Write the page about the run in a folder."""
    began = time.perf_counter()
    check_libraries()
    from trainload.report.runs.page import page_of
    from trainload.report.runs.run_folder import read_run

    path = output or (run_dir / _FILE if url_of(run_dir) is None else Path(_FILE))
    check_page_path(path)
    record = read_run(run_dir)
    text: bytes = page_of(record).encode()
    write_page(path, text)
    summary = record.history.summary
    result = {
        "run": place_name(run_dir),
        "report": path,
        "bytes": len(text),
        "phase": record.phase,
        "step": summary.step,
        "steps": record.spec.steps,
        "attempts": len(record.attempts),
        "failures": record.failures,
        "seconds": record.spent,
    }
    if as_json:
        print_json(result)
        return
    rows = [
        ("report", str(path)),
        ("bytes", len(text)),
        ("phase", record.phase),
        ("failures", len(record.failures)),
    ]
    out().print(view.table([*rows, ("seconds", time.perf_counter() - began)]))


def _report_store(place: str, output: Path | None, as_json: bool) -> None:
    """Return the page about the lines of a store."""
    from trainload.packaging.stores.store import Store

    url, _, line = place.partition("#")
    check_libraries()
    from trainload.report.stores.line_page import store_page

    store = Store(url)
    path = output or Path(_FILE)
    check_page_path(path)
    page, lines = store_page(store, [store.known_line(line)] if line else store.lines())
    text = page.encode()
    write_page(path, text)
    result = {"store": store.url, "report": path, "bytes": len(text), "lines": lines}
    if as_json:
        print_json(result)
    else:
        rows = [
            (
                name,
                f"{each['releases']} releases, {each['ticks']} ticks, {each['current']} is current",
            )
            for name, each in lines.items()
        ]
        out().print(view.table([("report", str(path)), ("bytes", len(text)), *rows]))


@click.command(short_help="Make a Grafana board.")
@click.option(
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="Write to FILE. Default: stdout.",
)
@json_option
def dashboard(output: Path | None, as_json: bool) -> None:
    """Write a Grafana dashboard of runs that were launched with --set sinks=prometheus, to be
    imported there.

    Without --output, the JSON is printed.
    """
    from trainload.deploy.grafana import board

    document = board()
    if output is None:
        print_json(document)
        return
    if output.exists():
        raise StorageError(
            "it exists already", where=str(output), hint="Choose another path, or remove it."
        )
    write_text(output, view.dump_json(document) + "\n")
    show_record(
        {"board": output, "title": document["title"], "panels": len(document["panels"])}, as_json
    )
