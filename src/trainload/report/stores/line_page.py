"""The report of a store: for each line the current release with its lineage, and the outcomes of
all ticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from trainload.core.formatting import size
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.report.frame.page_frame import rendered
from trainload.report.frame.words import sanitize, span
from trainload.report.stores.line_charts import charts_of
from trainload.retraining.ticks.lineage import (
    Ancestor,
    LineStory,
    TickStory,
    ancestry,
    metrics_of,
    read_line,
)
from trainload.retraining.ticks.tick_records import time_of

_MOST_TICKS = 500
_TONES = {
    "promoted": "good",
    "rejected": "failure",
    "failed": "failure",
    "bad data": "warning",
    "conflict": "warning",
    "replaced": "warning",
}


def store_page(store: Store, lines: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the report as HTML, and a summary of each line.

    Raises:
        StorageError: the store cannot be reached, or a line does not exist.
        IntegrityError: a record is damaged.
    """
    shown_lines = [
        _line(store, read_line(store, name), f"l{number}") for number, name in enumerate(lines)
    ]
    page = rendered("stores/line.html", store=sanitize(store.url), lines=shown_lines)
    return page, {
        line["name"]: {
            "current": line["current"],
            "releases": line["releases"],
            "ticks": line["count"],
        }
        for line in shown_lines
    }


def _line(store: Store, story: LineStory, name: str) -> dict[str, Any]:
    current = next((state for state in story.states if state.status == "current"), None)
    outcomes = Counter(
        "under way" if tick.ended is None else tick.ended.outcome for tick in story.ticks
    )
    tiles = [
        (
            "current",
            "none" if current is None else current.release.name,
            "" if current is None else f"since {story.history[-1].created}",
        ),
        (
            "releases",
            f"{len(story.states):,}",
            f"{size(sum(state.release.bytes for state in story.states))} if each were alone",
        ),
        (
            "ticks",
            f"{len(story.ticks):,}",
            f"until {time_of(story.ticks[-1].name):%Y-%m-%d %H:%M} UTC" if story.ticks else "",
        ),
        *((outcome, f"{count:,}", "") for outcome, count in outcomes.most_common()),
    ]
    steps = ancestry(store, story.line, current.release.name) if current is not None else ()
    return {
        "name": story.line,
        "current": None if current is None else current.release.name,
        "releases": len(story.states),
        "count": len(story.ticks),
        "tiles": tiles,
        # safe: ElementTree has escaped it
        "charts": [(chart, Markup(chart.svg)) for chart in charts_of(story.ticks, name)],
        "lineage": [_step(step) for step in steps],
        "ticks": [_tick(tick) for tick in reversed(story.ticks[-_MOST_TICKS:])],
        "ticks_before": max(0, len(story.ticks) - _MOST_TICKS),
        "changes": [
            (entry.created, shown(entry.release), sanitize(entry.reason))
            for entry in reversed(story.changes[-_MOST_TICKS:])
        ],
    }


def _step(step: Ancestor) -> dict[str, Any]:
    release, tick = step.state.release, step.tick
    facts: list[tuple[str, str]] = [
        ("package", release.package),
        ("program", release.program),
        ("weights", release.weights),
    ]
    if release.message:
        facts.append(("said", sanitize(release.message)))
    if tick is not None:
        facts += _facts(tick)
    return {
        "name": f"{step.line} {release.name}",
        "status": step.state.status,
        "how": step.how,
        "created": release.created,
        "facts": facts,
    }


def _facts(tick: TickStory) -> list[tuple[str, str]]:
    """Return facts about the tick that created a release."""
    facts: list[tuple[str, str]] = [("tick", f"{tick.name}, started {tick.begun} times")]
    if tick.taken is not None:
        snapshot = tick.taken.snapshot
        facts.append(
            (
                "data",
                (
                    f"{snapshot.rows:,} rows of {len(snapshot.good):,} files,"
                    f" {snapshot.held_out_rows:,} held out"
                ),
            )
        )
    if tick.trained is not None:
        facts.append(
            (
                "plan",
                ", ".join(f"{name} {value}" for name, value in sorted(tick.trained.plan.items())),
            )
        )
        facts.append(
            (
                "trained",
                (
                    f"{tick.trained.steps:,} steps, to a loss of {tick.trained.last_loss:.6g};"
                    f" {tick.trained.restarts} restarts"
                ),
            )
        )
        if "first step" in tick.trained.seconds:
            facts.append(("to the first step", span(tick.trained.seconds["first step"])))
        facts.append(("sent", size(tick.trained.sent_bytes)))
    facts += [(name, _format_scores(both)) for name, both in metrics_of(tick).items()]
    if tick.decided is not None:
        facts.append(("decision", sanitize(tick.decided.reason)))
    if tick.pinned is not None:
        facts.append(
            (
                "versions",
                ", ".join(
                    f"{name} {value}" for name, value in sorted(tick.pinned.versions.items())
                ),
            )
        )
    return facts


def _tick(tick: TickStory) -> dict[str, Any]:
    outcome = "under way" if tick.ended is None else tick.ended.outcome
    return {
        "time": f"{time_of(tick.name):%Y-%m-%d %H:%M:%S}",
        "outcome": outcome,
        "tone": _TONES.get(outcome, "idle"),
        "release": "" if tick.trained is None else shown(tick.trained.release),
        "rows": "" if tick.taken is None else f"{tick.taken.snapshot.rows:,}",
        "loss": _format_scores(metrics_of(tick).get("loss", {})),
        "begun": tick.begun,
        "reason": "" if tick.ended is None else sanitize(tick.ended.reason),
        "warnings": ()
        if tick.ended is None
        else tuple(sanitize(text) for text in tick.ended.warnings),
    }


def _format_scores(values: dict[str, float | None]) -> str:
    if not values:
        return ""
    champion, challenger = (
        "no number" if values.get(name) is None else f"{values[name]:.6g}"
        for name in ("champion", "challenger")
    )
    return f"{champion} → {challenger}"
