"""The command that profiles a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainload.cli.commands.shared import (
    HintedUsage,
    err,
    json_option,
    out,
    positive,
    print_json,
    run_argument,
)
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns
from trainload.core.formatting import size
from trainload.launching.run.run_place import place_name

if TYPE_CHECKING:
    from trainload.launching.api.profile_run import Profile
    from trainload.launching.profiling.profile_result import (
        InterpretedProfile,
        LineTime,
        RankProfile,
    )

_MOST_ROWS = 12
"""Maximum number of rows of a table; the files have all."""
_OF_MACHINE = ("-o", "--output", "--device", "--workers", "--name")
"""Options of `measure`."""
_NO_MODULE = "the model or the loss"


class _OfRun(click.Command):
    """A command whose errors mention `measure`, since it is easily taken for that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except (click.MissingParameter, click.NoSuchOption) as error:
            if isinstance(error, click.NoSuchOption) and error.option_name not in _OF_MACHINE:
                raise
            hint = "To measure this machine for `trainload plan`: trainload measure -o FILE"
            raise HintedUsage(
                error.message if isinstance(error, click.NoSuchOption) else error.format_message(),
                hint,
            ) from None


@click.command(short_help="Profile a run.", cls=_OfRun)
@run_argument
@click.option(
    "--steps", type=positive, default=3, metavar="N", show_default=True, help="Number of steps."
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Rank to profile, repeatable. Default: 0.",
)
@click.option("--trace-only", is_flag=True, help="No pass of the interpreted graphs.")
@click.option("--wait/--no-wait", default=True, help="Wait for the result.  [default: wait]")
@json_option
def profile(
    run_dir: Path,
    steps: int,
    ranks: tuple[int, ...],
    trace_only: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Profile the next steps of a running job: a trace for Perfetto, and tables of time by line and
    memory by kind, from a pass of the interpreted graphs. Results do not change.

    Exit status: 2 if the run is not running, 1 if it ends before the profile does.
    """
    from trainload.launching.api.profile_run import request_profile
    from trainload.launching.run.working_copy import RunFiles

    files = RunFiles(run_dir)
    files.update()
    requested = request_profile(
        files, steps, tuple(dict.fromkeys(ranks)) or (0,), trace_only=trace_only
    )
    if not wait:
        if as_json:
            print_json({"run": place_name(run_dir), "id": requested.request.id})
        else:
            err().print("profile requested; `trainload logs` shows when it is complete")
        return
    err().print(f"profile requested; waiting for {steps} steps of the run", highlight=False)
    found = requested.result()
    if as_json:
        print_json(found.as_json())
        return
    for each in found.ranks:
        _show(found, each)


def _show(found: Profile, rank: RankProfile) -> None:
    steps = f"{rank.step}" if rank.steps == 1 else f"{rank.step} to {rank.step + rank.steps - 1}"
    trace = found.as_json()["ranks"][found.ranks.index(rank)]["trace"]
    lines = [
        ("rank", f"{rank.rank} on {rank.host}"),
        (
            "steps",
            f"{steps}, {_time(rank.seconds)} ms each; then the run waited {found.seconds:.1f} s",
        ),
        ("trace", f"{trace}, for https://ui.perfetto.dev"),
        ("process", f"{size(rank.process_bytes)} in use"),
    ]
    if rank.interpreted is not None:
        lines.append(("peak", view.relative_path(rank.interpreted.at)))
    out().print(view.table(lines))
    out().print(_operators(rank))
    if rank.interpreted is not None:
        out().print(_lines(rank.interpreted))
        out().print(_modules(rank.interpreted))
        if rank.interpreted.collectives:
            out().print(_collectives(rank.interpreted))
        out().print(_memory(rank.interpreted))
        out().print(_memory_by_module(rank.interpreted))


def _operators(rank: RankProfile) -> Columns:
    numbers = ("calls", "ms", "share")
    title = "operators and kernels of a step, as it ran"
    table = Columns(("operator", *numbers), title=title, right=numbers)
    total = sum(each.seconds for each in rank.operators)
    for each in rank.operators[:_MOST_ROWS]:
        table.add(each.name, f"{each.calls:.3g}", _time(each.seconds), _share(each.seconds, total))
    return table


def _lines(found: InterpretedProfile) -> Columns:
    """Return a table of lines, each with the modules that call it, such as the layers of a kind."""
    numbers = ("forward ms", "backward ms", "share")
    title = "time by line, in the interpreted graphs"
    table = Columns(("line", *numbers, "module"), title=title, right=numbers)
    total = sum(each.seconds for each in found.lines)
    for line, parts in _longest(found, lambda each: each.line):
        module = parts[0].module or _NO_MODULE
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        table.add(view.relative_path(line) or "unknown", *_times(parts, total), module + more)
    return table


def _modules(found: InterpretedProfile) -> Columns:
    numbers = ("forward ms", "backward ms", "share")
    title = "time by module, in the interpreted graphs"
    table = Columns(("module", *numbers), title=title, right=numbers)
    total = sum(each.seconds for each in found.lines)
    for module, parts in _longest(found, lambda each: each.module):
        table.add(module or _NO_MODULE, *_times(parts, total))
    return table


def _longest(
    found: InterpretedProfile, key: Callable[[LineTime], str]
) -> list[tuple[str, list[LineTime]]]:
    """Return the entries that have a key in common, for the keys that take the most time."""
    grouped: dict[str, list[LineTime]] = {}
    for each in found.lines:
        grouped.setdefault(key(each), []).append(each)
    ordered = sorted(grouped.items(), key=lambda group: -sum(each.seconds for each in group[1]))
    return ordered[:_MOST_ROWS]


def _times(parts: Sequence[LineTime], total: float) -> tuple[str, str, str]:
    forward, backward = sum(each.forward for each in parts), sum(each.backward for each in parts)
    return _time(forward), _time(backward), _share(forward + backward, total)


def _collectives(found: InterpretedProfile) -> Columns:
    title = "collectives, in the interpreted graphs"
    table = Columns(("collective", "calls", "ms"), title=title, right=("calls", "ms"))
    for each in found.collectives:
        table.add(each.operator, str(each.calls), _time(each.seconds))
    return table


def _memory(found: InterpretedProfile) -> Columns:
    numbers = ("at the peak", "most", "plan")
    title = "memory by kind, in the interpreted graphs"
    table = Columns(("kind", *numbers), title=title, right=numbers)
    for each in found.memory:
        plan = "" if each.estimate is None else size(each.estimate)
        table.add(each.kind, size(each.peak), size(each.most), plan)
    table.add("all", size(sum(each.peak for each in found.memory)))
    return table


def _memory_by_module(found: InterpretedProfile) -> Columns:
    table = Columns(
        ("module", "memory", "of these"), title="memory by module at the peak", right=("memory",)
    )
    for each in found.modules[:_MOST_ROWS]:
        kinds = sorted(each.kinds.items(), key=lambda entry: -entry[1])
        named = ", ".join(f"{kind} {size(count)}" for kind, count in kinds)
        table.add(each.module or _NO_MODULE, size(each.bytes), named)
    return table


def _time(seconds: float) -> str:
    """Return milliseconds."""
    return f"{1e3 * seconds:,.1f}"


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total else ""
