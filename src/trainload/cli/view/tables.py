"""Lines, tables and JSON: events and state of a run, and any record.

`run_progress` shows the progress of a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.text import Text

from trainload.cli.view.column_table import Columns, Pairs
from trainload.core.formatting import clock, duration, size

if TYPE_CHECKING:
    from trainload.capture.shapes.shape_report import ShapeReport
    from trainload.launching.run.run_state import RunState

_QUIET = frozenset({"step", "steps", "kind", "name", "workers", "nodes"})


class Event(Protocol):
    """An event of a run: `kind` is stage, step, eval, checkpoint, warning or end."""

    @property
    def kind(self) -> str: ...

    @property
    def data(self) -> Mapping[str, Any]: ...


def step_line(data: Mapping[str, Any]) -> str:
    """Return a line about a step, with the number of finished steps (steps count from 0)."""
    total = f"/{data['steps']}" if data.get("steps") is not None else ""
    time_left = (
        f"  {duration(data['seconds_left'])} left" if data.get("seconds_left") is not None else ""
    )
    return f"step {int(data['step']) + 1}{total}  {numbers(data)}{time_left}"


def event_line(event: Event) -> str:
    """Return a line about an event that is not a step; for a failure, also a line for each rank."""
    data = event.data
    if event.kind == "failure":
        rank_lines = [f"  rank {rank}: {text}" for rank, text in data["doing"].items()]
        return "\n".join([f"failure: {data['message']}; {data['action']}", *rank_lines])
    if "message" in data:
        return f"{event.kind}: {data['message']}"
    if event.kind == "profile":
        return _profile_line(data)
    if event.kind == "statistics":
        about = (
            f"of {len(data['activations'])} activations and {len(data['parameters'])} parameters"
        )
        return "\n".join(
            [
                f"statistics at step {data['step']}: {about}",
                *(f"  {each}" for each in data["notes"]),
            ]
        )
    title = f"{event.kind} {data['name']}" if "name" in data else event.kind
    if "step" in data:
        title += f" at step {data['step']}"
    values = (
        f"{name.replace('_', ' ')} {_format_value(name, value)}"
        for name, value in data.items()
        if name not in _QUIET and value not in (None, {})
    )
    return "  ".join([f"{title}:", *values]) if len(data.keys() - _QUIET) else title


def _profile_line(data: Mapping[str, Any]) -> str:
    """Return a line about a profile, whose first step counts from 0."""
    if data["error"]:
        return f"profile: not complete: {data['error']}"
    first, last = data["step"] + 1, data["step"] + data["steps"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = ", ".join(map(str, data["ranks"]))
    return f"profile of {steps}, ranks {ranks}: {data['where']}  {duration(data['seconds'])}"


def log_line(event: Event, seconds: float) -> str:
    """Describe an event of a run's journal. `seconds` is its Unix time, shown in UTC."""
    line = step_line(event.data) if event.kind == "step" else event_line(event)
    return f"{clock(seconds)}  {line}"


def status_table(name: str, state: RunState) -> Pairs:
    """Return a table of a run's state."""
    summary, now = state.summary, time.time()
    rows: list[tuple[str, Any]] = [("run", name), ("phase", state.phase)]
    rows.append(
        (
            "step",
            f"{summary.step} of {summary.steps}"
            + (f", {duration(summary.seconds_left)} left" if summary.seconds_left else ""),
        )
    )
    if summary.loss is not None:
        rows.append(("loss", summary.loss))
    if summary.gradient_norm is not None:
        rows.append(("gradient norm", summary.gradient_norm))
    if summary.evaluation is not None:
        rows.append(("evaluation", f"{summary.evaluation:.4f} at step {summary.evaluated_at}"))
    rate = summary.tokens_per_second or summary.rows_per_second
    if rate is not None:
        rows.append(("rate", f"{rate:,.0f} {'tokens' if summary.tokens_per_second else 'rows'}/s"))
    if summary.mfu is not None:
        rows.append(("MFU", f"{summary.mfu:.1%}"))
    if summary.memory is not None:
        rows.append(("memory", f"{size(summary.memory)}, the largest of all ranks"))
    if summary.data_wait is not None:
        rows.append(("waiting for data", f"{summary.data_wait:.1%} of the time"))
    saved = (
        "none"
        if summary.checkpoint is None
        else f"step {summary.checkpoint}, {duration(now - (summary.checkpoint_time or now))} ago"
    )
    rows += [
        ("checkpoint", saved),
        ("ranks", f"{summary.world}, {summary.strategy}" if summary.world else "none yet"),
    ]
    rows.append(
        (
            "failures",
            f"{summary.failures}, the last: {summary.last_failure}" if summary.failures else "none",
        )
    )
    if summary.message:
        rows.append(("because", summary.message))
    rows.append(
        (
            "driver",
            f"process {state.pid} on {state.host}, last seen {duration(now - state.time)} ago",
        )
    )
    return table(rows)


def ranks_table(state: RunState, most: int | None = None) -> Columns:
    """Return a table of ranks.

    `most`: maximum number; those furthest behind, or silent for longest, come first.
    """
    columns = Columns(
        ("rank", "node", "pid", "last seen", "memory", "does"), right={"rank", "pid", "memory"}
    )
    ordered = sorted(
        state.ranks.items(),
        key=lambda each: (
            each[1].step if each[1].step is not None else -1,
            -round(each[1].age),
            each[0],
        ),
    )
    for rank, seen in sorted(ordered[:most]):
        does = seen.phase if seen.step is None else f"{seen.phase}, step {seen.step + 1}"
        columns.add(
            str(rank),
            seen.node[:12],
            str(seen.pid),
            f"{seen.age:.0f}s ago",
            size(seen.memory),
            does,
        )
    if most is not None and len(ordered) > most:
        columns.add("", f"and {len(ordered) - most} more")
    return columns


def run_cells(state: RunState) -> tuple[str, ...]:
    """Return a run's row: phase, step, loss, checkpoint, failures, time of last report."""
    summary = state.summary
    loss = "" if summary.loss is None else f"{summary.loss:.4f}"
    saved = "" if summary.checkpoint is None else str(summary.checkpoint)
    return (
        state.phase,
        f"{summary.step}/{summary.steps}",
        loss,
        saved,
        str(summary.failures),
        f"{duration(time.time() - state.time)} ago",
    )


def numbers(data: Mapping[str, Any]) -> str:
    """Return loss, metrics and throughput of a step as a short text."""
    parts = [f"loss {data['loss']:.4f}"] if "loss" in data else []
    parts += [
        f"{name} {value:.4f}"
        for name, value in data.get("metrics", {}).items()
        if not name.endswith(".gradient_norm")
    ]
    for unit in ("tokens", "rows"):
        rate = data.get(f"{unit}_per_second")
        if rate is not None:
            parts.append(f"{rate:,.0f} {unit}/s")
            break
    return "  ".join(parts)


def as_json(value: Any) -> Any:
    """Convert a value to JSON's types: records become objects, paths and enums strings, NaN and
    infinities null.

    Raises:
        TypeError: it contains a value that cannot be converted.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if hasattr(value, "model_dump"):
        return as_json(value.model_dump(mode="json"))
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def dump_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(as_json(value), indent=2, allow_nan=False)


def table(rows: Iterable[tuple[str, Any]], title: str | None = None) -> Pairs:
    """Return a table of names and values."""
    values = [(name.replace("_", " "), Text(_format_value(name, value))) for name, value in rows]
    return Pairs(values, title=title)


def record_table(record: Any, title: str | None = None) -> Pairs:
    """Return a table of a record's fields, without those that are None or empty."""
    fields = as_json(record)
    return table(
        ((name, value) for name, value in fields.items() if value not in (None, [], {}, "")), title
    )


def print_shapes(console: Console, report: ShapeReport) -> None:
    """Print which sizes each dim of a job's inputs accepts, why, and how to declare more; then
    torch's reasons, if it rejects the declaration.
    """
    columns = Columns(
        ("dim", "example", "may be", "declared", "because of", "for more"),
        title="sizes of the training graph",
    )
    for dim in report.dims:
        most = "" if dim.most is None else dim.most
        span = str(dim.least) if dim.symbol is None else f"{dim.symbol}: {dim.least}..{most}"
        causes = "\n".join(
            f"{relative_path(cause.place)} {cause.condition}\n  {cause.line}"
            for cause in dim.causes
        )
        relax = dim.relax
        for cause in dim.causes:
            relax = relax.replace(cause.place, relative_path(cause.place))
        columns.add(f"{dim.input}[{dim.dim}]", str(dim.example), span, dim.declared, causes, relax)
    console.print(columns)
    for title, lines in (
        ("refused", report.refused),
        ("torch suggests (--apply-suggested-fixes)", report.fixes),
    ):
        for line in lines:
            console.print(f"{title}: {line}", markup=False, highlight=False, soft_wrap=True)


def relative_path(place: str) -> str:
    """Return a path relative to the current folder, if it is inside."""
    return place.removeprefix(f"{Path.cwd()}/")


def _format_value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return size(value) if "bytes" in name else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_value(str(key), entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_format_value(name, entry) for entry in value[:6]) + (
            f" and {len(value) - 6} more" if len(value) > 6 else ""
        )
    return str(value)
