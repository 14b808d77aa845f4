"""The report of a run: one self-contained HTML file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainload.core.formatting import duration
from trainload.launching.run.run_state import RankSeen
from trainload.report.frame.page_frame import rendered
from trainload.report.frame.words import count, moment, percent, ranks, sanitize, span
from trainload.report.runs.charts import charts_of
from trainload.report.runs.failures import Failure
from trainload.report.runs.run_folder import Record, facts_of
from trainload.report.runs.sampled import samples_of
from trainload.report.runs.timeline import ENDS, OUTCOMES, timeline_of

_WIDE, _NARROW = 11.2, 4.6
"""Widths of the timeline in inches."""
_MOST_FAILURES, _MOST_GROUPS, _MOST_WARNINGS, _MOST_RANKS = 100, 8, 50, 256
_LONG = 600
_TONES = {
    "ended": "good",
    "running": "train",
    "waiting": "warning",
    "stopped": "idle",
    "failed": "failure",
    "lost": "failure",
}
_SPENT = {
    "steps": "train",
    "steps done again": "again",
    "evaluations": "evaluation",
    "checkpoints": "good",
    "starting": "idle",
    "waiting for nodes or storage": "warning",
    "until failures were noticed": "failure",
    "nobody drove it": "away",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class _FailureRow:
    """A failure as displayed. `doing` has pairs of ranks and their activity."""

    time: str
    what: str
    message: str
    action: str
    whose: str
    nodes: Sequence[str]
    doing: Sequence[tuple[str, str]]
    more: int
    noticed: str
    lost: str
    again: str


def page_of(record: Record) -> str:
    """Return the report of a run as HTML."""
    return rendered(
        "runs/page.html",
        name=record.run_dir.name,
        folder=sanitize(record.spec.run_dir),
        phase=record.phase,
        tone=_TONES[record.phase],
        because=sanitize(_explain_phase(record)),
        done=_share(record.history.summary.step, record.spec.steps),
        tiles=_tiles(record),
        facts=facts_of(record),
        # safe: ElementTree has escaped it
        charts=[(chart, Markup(chart.svg)) for chart in charts_of(record.history)],
        samples=samples_of(record.history),
        timelines=_timelines(record),
        outcomes=_outcomes(record),
        away=any(each.away is not None for each in record.attempts),
        spent=_spent(record.spent),
        failures=[_failure_row(each) for each in record.failures[-_MOST_FAILURES:]],
        failures_before=max(0, len(record.failures) - _MOST_FAILURES),
        warnings=_warnings(record)[-_MOST_WARNINGS:],
        warnings_before=max(0, len(_warnings(record)) - _MOST_WARNINGS),
        ranks=_ranks(record),
        heard=None if record.state is None else moment(record.state.time),
        driver=(
            None if record.state is None else f"process {record.state.pid} on {record.state.host}"
        ),
        ranks_more=0 if record.state is None else max(0, len(record.state.ranks) - _MOST_RANKS),
    )


def _explain_phase(record: Record) -> str:
    """Return an explanation of the run's phase; "" if it needs none."""
    if record.phase == "lost" and record.state is not None:
        return (
            f"its driver, process {record.state.pid} on {record.state.host}, was last heard of at"
            f" {moment(record.state.time)}"
        )
    return record.history.summary.message


def _share(part: float, total: float) -> float:
    return 100.0 * min(1.0, part / total) if total else 0.0


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    """Return the tiles: name, number and remark of each."""
    summary, history = record.history.summary, record.history
    tiles = [("step", f"{summary.step:,}", f"of {record.spec.steps:,}")]
    if summary.loss is not None:
        tiles.append(("training loss", f"{summary.loss:.4f}", "of the last step"))
    if summary.evaluation is not None:
        tiles.append(
            ("evaluation", f"{summary.evaluation:.4f}", f"at step {summary.evaluated_at:,}")
        )
    rate = summary.tokens_per_second or summary.rows_per_second
    if rate is not None:
        tiles.append(
            ("throughput", count(rate), "tokens/s" if summary.tokens_per_second else "rows/s")
        )
    if history.first is not None and history.last is not None:
        total = history.last - history.first
        driven_seconds = total - record.spent.get("nobody drove it", 0.0)
        tiles.append(("time", span(total), f"since {moment(history.first)[5:16]}"))
        if driven_seconds > 0:
            tiles.append(
                (
                    "goodput",
                    percent(record.spent.get("steps", 0.0) / driven_seconds),
                    "of the time, in steps that count",
                )
            )
    if summary.checkpoint is not None and summary.checkpoint_time is not None:
        tiles.append(
            ("checkpoint", f"{summary.checkpoint:,}", f"at {moment(summary.checkpoint_time)[5:16]}")
        )
    repeated = sum(each.again or 0 for each in record.failures)
    tiles.append(
        (
            "failures",
            f"{len(record.failures):,}",
            f"{repeated:,} steps done again" if record.failures else "none",
        )
    )
    return tiles


def _timelines(record: Record) -> list[tuple[str, Markup]]:
    """Return (CSS class, SVG) of the timelines for wide and for narrow screens."""
    timelines = []
    for name, width in (("wide", _WIDE), ("narrow", _NARROW)):
        svg = timeline_of(record.history, record.attempts, record.failures, name, width)
        if svg is not None:
            timelines.append((name, Markup(svg)))  # safe: ElementTree has escaped it
    return timelines


def _outcomes(record: Record) -> list[tuple[str, str]]:
    """Return (CSS class, description) of the outcomes of attempts, for the legend."""
    present = {each.outcome for each in record.attempts if each.outcome != "going on"}
    return [(ENDS[outcome], words) for outcome, words in OUTCOMES.items() if outcome in present]


def _spent(spent: Mapping[str, float]) -> list[tuple[str, str, float, str, str]]:
    """Return name, CSS class, percentage, percentage as text and duration as text of each use of
    time.
    """
    total = sum(spent.values())
    return [
        (name, _SPENT[name], _share(seconds, total), percent(seconds / total), span(seconds))
        for name, seconds in spent.items()
    ]


def _failure_row(failure: Failure) -> _FailureRow:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(failure.doing.items()):
        groups[text].append(rank)
    doing = [(ranks(members), sanitize(text, _LONG)) for text, members in groups.items()]
    return _FailureRow(
        time=moment(failure.time),
        what=failure.what,
        message=sanitize(failure.message, _LONG),
        action=sanitize(failure.action, _LONG),
        whose=ranks(failure.ranks),
        nodes=[sanitize(node, _LONG) for node in failure.nodes[:_MOST_GROUPS]],
        doing=doing[:_MOST_GROUPS],
        more=len(doing) - _MOST_GROUPS,
        noticed="" if failure.what == "broke off" else span(failure.noticed),
        lost="" if failure.lost is None else span(failure.lost),
        again="" if failure.again is None else f"{failure.again:,}",
    )


def _warnings(record: Record) -> list[tuple[str, int, str]]:
    """Return the warnings: time of the last occurrence, number of occurrences and message of
    each.
    """
    latest: dict[str, tuple[float, int]] = {}
    for event in record.history.of("warning"):
        message = str(event.data["message"])
        latest[message] = (event.time, latest.pop(message, (0.0, 0))[1] + 1)
    return [
        (moment(at), times, sanitize(message, _LONG)) for message, (at, times) in latest.items()
    ]


def _ranks(record: Record) -> list[tuple[int, RankSeen, str, str]]:
    """Return the ranks: number, last heartbeat, its age and the activity of each."""
    if record.state is None:
        return []
    seen = sorted(record.state.ranks.items())[:_MOST_RANKS]
    return [(rank, each, duration(each.age), sanitize(each.doing, _LONG)) for rank, each in seen]
