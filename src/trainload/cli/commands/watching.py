"""Commands about runs of other processes, and about finished runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands.shared import (
    Place,
    err,
    json_option,
    out,
    positive,
    print_json,
    run_argument,
)
from trainload.cli.view import run_progress as run_view
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns
from trainload.core.errors import StorageError
from trainload.core.storage.places import is_url, local_path
from trainload.launching.run.run_place import place_name, url_of

if TYPE_CHECKING:
    from trainload.launching.run.run_state import RunState
    from trainload.launching.run.working_copy import RunFiles

_LOOK_SECONDS = 0.2
_LOOK_SECONDS_AT_URL = 1.0
_PATIENCE_SECONDS = 600.0
"""Time for which storage may fail while a run is followed: the default patience of runs."""


@click.command(short_help="Show a run's status.")
@run_argument
@click.option("--follow", is_flag=True, help="Update until the run is over.")
@json_option
def status(run_dir: Path, follow: bool, as_json: bool) -> None:
    """Show the status of a run: progress, ranks and recent failures."""
    from trainload.launching.run.working_copy import RunFiles

    files = RunFiles(run_dir, journal=follow)
    state = _follow(files) if follow else _require_state(files)
    place = place_name(run_dir)
    if as_json:
        print_json({"run": place, "phase": state.phase, **state.model_dump(mode="json")})
        return
    out().print(view.status_table(place, state))
    if state.ranks and not state.over:
        out().print(view.ranks_table(state))


@click.command(short_help="List runs.")
@click.argument("folder", metavar="[FOLDER]", type=Place(), default="runs")
@json_option
def runs(folder: str, as_json: bool) -> None:
    """List the runs in FOLDER, or below a URL (default: runs/), the latest first."""
    listed = _listed(folder)
    listed.sort(key=lambda each: each[1].time if each[1] is not None else 0.0, reverse=True)
    if as_json:
        print_json(
            [
                {"run": path, **({"phase": "unknown"} if state is None else _summary_record(state))}
                for path, state in listed
            ]
        )
        return
    numbers = ("step", "loss", "checkpoint", "failures", "last seen")
    table = Columns(("run", "phase", *numbers), right=numbers)
    for path, state in listed:
        name = path.rpartition("/")[2]
        table.add(name, *(view.run_cells(state) if state is not None else ("unknown",)))
    out().print(table)


def _listed(folder: str) -> list[tuple[str, RunState | None]]:
    """Return the place and the last state of each run in a folder or below a URL."""
    from trainload.launching.run.run_directory import RUN_FILE
    from trainload.launching.run.run_state import read_state
    from trainload.launching.run.working_copy import runs_at

    if is_url(folder):
        return list(runs_at(folder))
    if not local_path(folder).is_dir():
        raise StorageError(
            "there is no such folder",
            where=folder,
            hint="Pass the folder that contains the folders of runs.",
        )
    found = [path.parent for path in local_path(folder).glob(f"*/{RUN_FILE}")]
    return [(str(path), read_state(path)) for path in found]


@click.command(short_help="Show a run's log.")
@run_argument
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Output of this rank. Default: events."
)
@click.option("--follow", is_flag=True, help="Follow until the run is over.")
@click.option("--last", type=positive, metavar="N", help="Print only the last N lines.")
@json_option
def logs(run_dir: Path, rank: int | None, follow: bool, last: int | None, as_json: bool) -> None:
    """Show the events of a run, or the output of one rank. With --json: events as JSON lines."""
    from trainload.launching.run.journal import JOURNAL, LOGS, event_of, log_name
    from trainload.launching.run.working_copy import RunFiles

    if rank is not None and as_json:
        raise click.UsageError("--json cannot be combined with --rank: a rank's output is text.")
    files = RunFiles(run_dir, journal=rank is None, rank=rank)
    state = _require_state(files)
    path = run_dir / JOURNAL if rank is None else run_dir / LOGS / log_name(rank)
    if rank is not None and not path.exists() and not follow:
        _report_silence(rank, run_dir, state, files)
        return
    for line in _lines(path, files, follow=follow, last=last):
        event = None if as_json or rank is not None else event_of(line)
        click.echo(line if event is None else view.log_line(event, event.time))


@click.command(short_help="Stop a run.")
@run_argument
@click.option("--wait/--no-wait", default=True, help="Return when it is over.  [default: wait]")
@json_option
def stop(run_dir: Path, wait: bool, as_json: bool) -> None:
    """Stop a run after a checkpoint of the current step. It can be resumed."""
    from trainload.launching.run.contact import Request
    from trainload.launching.run.working_copy import RunFiles, request

    files, place = RunFiles(run_dir, journal=False), place_name(run_dir)
    state = _require_state(files)
    if not state.alive:
        raise StorageError(
            "the run is not running",
            where=place,
            got=f"phase {state.phase}",
            hint="There is nothing to stop.",
        )
    try:
        request(run_dir, Request.STOP)
    except OSError as error:
        raise StorageError(
            f"the request cannot be written: {error.strerror}", where=place
        ) from error
    if wait:
        err().print(
            "stop requested; the run ends after its current step, with a checkpoint",
            highlight=False,
        )
        state = _wait_for_end(files)
    if as_json:
        print_json({"run": place, **_summary_record(state)})
    elif wait:
        out().print(view.status_table(place, state))


def _report_silence(rank: int, run_dir: Path, state: RunState, files: RunFiles) -> None:
    """Say that a rank has printed nothing; raise if the run has no such rank."""
    from trainload.launching.run.journal import LOGS, log_name

    hint = (
        "Runs on Ray keep all output of their workers, other runs only the traceback of an error."
        " torchrun has --log-dir."
    )
    if rank in state.ranks:
        click.echo(f"rank {rank} has printed nothing. {hint}", err=True)
        return
    ranks = sorted({*state.ranks, *files.ranks_with_output()})
    raise StorageError(
        f"rank {rank} has printed nothing",
        where=f"{place_name(run_dir)}/{LOGS}/{log_name(rank)}",
        expected=f"one of {', '.join(map(str, ranks))}" if ranks else "",
        hint=hint,
    )


def _require_state(files: RunFiles) -> RunState:
    from trainload.launching.run.working_copy import reported_state

    return reported_state(files)


def _follow(files: RunFiles) -> RunState:
    """Show a run until it has ended. Returns its last state."""
    from trainload.launching.run.journal import Follower

    _require_state(files)
    follower = Follower(files.folder)
    with run_view.RunView(err(), files.folder, past=follower.new()) as show:
        while True:
            state = _next_state(files)
            for event in follower.new():
                show(event)
            if not state.alive:
                return state
            time.sleep(_pause(files))


def _wait_for_end(files: RunFiles) -> RunState:
    """Wait for the end of a run, and return its last state."""
    while (state := _next_state(files)).alive:
        time.sleep(_pause(files))
    return state


def _next_state(files: RunFiles) -> RunState:
    """Return the last state of a run that is followed, whose storage may fail for a while.

    Raises:
        StorageError: it fails for longer.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return _require_state(files)
        except StorageError:
            if not files.is_at_url or time.monotonic() > until:
                raise
        time.sleep(_LOOK_SECONDS_AT_URL)


def _summary_record(state: RunState) -> dict[str, Any]:
    """Return a run's row in a list of runs."""
    summary = state.summary
    return {
        "phase": state.phase,
        "step": summary.step,
        "steps": summary.steps,
        "loss": summary.loss,
        "checkpoint": summary.checkpoint,
        "failures": summary.failures,
        "message": summary.message,
        "time": state.time,
    }


def _pause(files: RunFiles) -> float:
    """Return the seconds between two looks at a run."""
    return _LOOK_SECONDS if url_of(files.folder) is None else _LOOK_SECONDS_AT_URL


def _lines(path: Path, files: RunFiles, *, follow: bool, last: int | None) -> Iterator[str]:
    """Yield the complete lines of a file; with `follow`, also new ones until the run has ended."""
    partial = ""
    at = 0
    first = True
    while True:
        over = not follow or not _next_state(files).alive
        if path.exists():
            with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                file.seek(at)
                text = partial + file.read()
                at = file.tell()
            *lines, partial = text.split("\n")
            yield from lines[-last:] if first and last is not None else lines
            first = False
        if over:
            if partial:
                yield partial
            return
        time.sleep(_pause(files))
