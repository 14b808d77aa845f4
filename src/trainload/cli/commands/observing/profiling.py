"""The command that profiles a running job, or measures this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainload.cli.commands.planning import KINDS, measure_machine
from trainload.cli.commands.shared import (
    LocalPath,
    RunPlace,
    err,
    json_option,
    out,
    positive,
    print_json,
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
    from trainload.sharding.plans.plan import DeviceKind

_MOST_ROWS = 12
"""Maximum number of rows of a table; the files have all."""
_NO_MODULE = "the model or the loss"
_OF_MACHINE = ("output", "device", "workers", "name")
_OF_RUN = ("steps", "ranks", "trace_only", "wait")


@click.command(short_help="Profile a running job.")
@click.argument("run_dir", metavar="[RUN_DIR]", required=False, type=RunPlace(reads=True))
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
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="File for the machine's profile.",
)
@click.option(
    "--device",
    type=click.Choice(KINDS),
    default="cpu",
    show_default=True,
    help="The machine's devices.",
)
@click.option(
    "--workers",
    type=positive,
    metavar="N",
    default=2,
    show_default=True,
    help="Processes that measure its links.",
)
@click.option("--name", metavar="NAME", help="Name of its device. Default: FILE's.")
@json_option
@click.pass_context
def profile(
    context: click.Context,
    run_dir: Path | None,
    steps: int,
    ranks: tuple[int, ...],
    trace_only: bool,
    wait: bool,
    output: Path | None,
    device: DeviceKind,
    workers: int,
    name: str | None,
    as_json: bool,
) -> None:
    """Profile the next steps of a running job: a trace for Perfetto, and tables of time by line and
    memory by kind, from a pass of the interpreted graphs. Results do not change.

    Without RUN_DIR, measure this machine for `plan --device FILE`. Takes a minute; nothing else
    should run at the same time.

    Exit status: 2 if the run is not running, 1 if it ends before the profile does.
    """
    _check_options(context, of_run=run_dir is not None)
    if run_dir is None:
        if output is None:
            raise click.UsageError("Pass RUN_DIR, or -o FILE to measure this machine.")
        measure_machine(output, device, workers, name, as_json=as_json)
    else:
        _profile_run(run_dir, steps, ranks or (0,), trace_only, wait, as_json)


def _check_options(context: click.Context, *, of_run: bool) -> None:
    """Raise UsageError if an option of the other use of the command is passed."""
    for name in _OF_MACHINE if of_run else _OF_RUN:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = "rank" if name == "ranks" else name.replace("_", "-")
            with_or_without = "with" if of_run else "without"
            raise click.UsageError(f"--{option} cannot be used {with_or_without} RUN_DIR.")


def _profile_run(
    run_dir: Path,
    steps: int,
    ranks: tuple[int, ...],
    trace_only: bool,
    wait: bool,
    as_json: bool,
) -> None:
    from trainload.launching.api.profile_run import request_profile
    from trainload.launching.run.working_copy import RunFiles

    files = RunFiles(run_dir)
    files.update()
    requested = request_profile(files, steps, tuple(dict.fromkeys(ranks)), trace_only=trace_only)
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
