"""Commands about runs of other processes, and about finished runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands.shared import err, json_option, out, positive, print_json, run_argument
from trainload.cli.view import run_progress as run_view
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns
from trainload.core.errors import StorageError

if TYPE_CHECKING:
    from trainload.launching.run.run_state import RunState

_LOOK_SECONDS = 0.2


@click.command(short_help="Show a run's status.")
@run_argument
@click.option("--follow", is_flag=True, help="Update until the run is over.")
@json_option
def status(run_dir: Path, follow: bool, as_json: bool) -> None:
    """Show the status of a run: progress, ranks and recent failures."""
    state = _follow(run_dir) if follow else _require_state(run_dir)
    if as_json:
        print_json({"run": run_dir, "phase": state.phase, **state.model_dump(mode="json")})
        return
    out().print(view.status_table(str(run_dir), state))
    if state.ranks and not state.over:
        out().print(view.ranks_table(state))


@click.command(short_help="List runs.")
@click.argument("folder", metavar="[FOLDER]", type=click.Path(path_type=Path), default=Path("runs"))
@json_option
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs/), the latest first."""
    from trainload.launching.run.run_directory import RUN_FILE
    from trainload.launching.run.run_state import read_state

    if not folder.is_dir():
        raise StorageError(
            "there is no such folder",
            where=str(folder),
            hint="Pass the folder that contains the folders of runs.",
        )
    listed = [(path.parent, read_state(path.parent)) for path in folder.glob(f"*/{RUN_FILE}")]
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
        table.add(path.name, *(view.run_cells(state) if state is not None else ("unknown",)))
    out().print(table)


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

    if rank is not None and as_json:
        raise click.UsageError("--json cannot be combined with --rank: a rank's output is text.")
    _require_state(run_dir)
    path = run_dir / JOURNAL if rank is None else run_dir / LOGS / log_name(rank)
    if rank is not None and not path.exists() and not follow:
        existing_ranks = sorted(
            int(each.stem.partition("-")[2]) for each in (run_dir / LOGS).glob("rank-*.log")
        )
        raise StorageError(
            f"rank {rank} has printed nothing",
            where=str(path),
            expected=f"one of {', '.join(map(str, existing_ranks))}" if existing_ranks else "",
            hint=(
                "Runs on Ray keep all output of their workers, other runs only the traceback of an"
                " error. torchrun has --log-dir."
            ),
        )
    for line in _lines(path, run_dir, follow=follow, last=last):
        event = None if as_json or rank is not None else event_of(line)
        click.echo(line if event is None else view.log_line(event, event.time))


@click.command(short_help="Stop a run.")
@run_argument
@click.option("--wait/--no-wait", default=True, help="Return when it is over.  [default: wait]")
@json_option
def stop(run_dir: Path, wait: bool, as_json: bool) -> None:
    """Stop a run after a checkpoint of the current step. It can be resumed."""
    from trainload.launching.run.contact import Request

    state = _require_state(run_dir)
    if not state.alive:
        raise StorageError(
            "the run is not running",
            where=str(run_dir),
            got=f"phase {state.phase}",
            hint="There is nothing to stop.",
        )
    try:
        (run_dir / Request.STOP.file).touch()
    except OSError as error:
        raise StorageError(
            f"the request cannot be written: {error.strerror}", where=str(run_dir)
        ) from error
    if wait:
        err().print(
            "stop requested; the run ends after its current step, with a checkpoint",
            highlight=False,
        )
        state = _wait_for_end(run_dir)
    if as_json:
        print_json({"run": run_dir, **_summary_record(state)})
    elif wait:
        out().print(view.status_table(str(run_dir), state))


def _require_state(run_dir: Path) -> RunState:
    """Return the last state that a run's driver wrote."""
    from trainload.launching.run.run_directory import RUN_FILE
    from trainload.launching.run.run_state import read_state

    if not (run_dir / RUN_FILE).exists():
        raise StorageError(
            "there is no such run",
            where=str(run_dir),
            hint="Pass the folder that was passed to `trainload launch --run-dir`.",
        )
    state = read_state(run_dir)
    if state is None:
        raise StorageError(
            "the run has not reported anything yet",
            where=str(run_dir),
            hint="Try again after it has started.",
        )
    return state


def _follow(run_dir: Path) -> RunState:
    """Show a run until it has ended. Returns its last state."""
    from trainload.launching.run.journal import Follower

    follower = Follower(run_dir)
    with run_view.RunView(err(), run_dir, past=follower.new()) as show:
        while True:
            state = _require_state(run_dir)
            for event in follower.new():
                show(event)
            if not state.alive:
                return state
            time.sleep(_LOOK_SECONDS)


def _wait_for_end(run_dir: Path) -> RunState:
    """Wait for the end of a run, and return its last state."""
    while (state := _require_state(run_dir)).alive:
        time.sleep(_LOOK_SECONDS)
    return state


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


def _lines(path: Path, run_dir: Path, *, follow: bool, last: int | None) -> Iterator[str]:
    """Yield the complete lines of a file; with `follow`, also new ones until the run has ended."""
    partial = ""
    at = 0
    first = True
    while True:
        over = not follow or not _require_state(run_dir).alive
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
        time.sleep(_LOOK_SECONDS)
