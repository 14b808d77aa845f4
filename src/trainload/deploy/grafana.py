"""A Grafana dashboard for the metrics of the sink "prometheus", whose names it takes from
sinks/measures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainload.launching.sinks.measures import (
    CHECKPOINT_BYTES,
    CHECKPOINT_SECONDS,
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    DATA_WAIT,
    EVALUATION_LOSS,
    EVALUATION_METRICS,
    FAILURES,
    GRADIENT_NORM,
    LOSS,
    LOSS_SCALE,
    MEMORY,
    METRIC,
    METRICS,
    MFU,
    ROWS,
    RUNNING,
    STATISTICS,
    STEP,
    STEP_SECONDS,
    STEPS,
    TOKENS,
    WARNINGS,
    Measure,
)

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UID = "trainload-runs"
_SCHEMA = 39
"""Schema version of Grafana dashboards; later versions of Grafana upgrade it."""
_MOST_CURVES = 10
"""Number of curves of a panel about all modules or parameters."""
_WIDTH = 24
"""Width of Grafana's grid."""


def board() -> dict[str, Any]:
    """Return the dashboard that Grafana imports (Dashboards, New, Import).

    Data source and runs are selected in it.
    """
    first = LOSS.exported
    return {
        "uid": _UID,
        "title": "trainload runs",
        "description": "Runs of trainload on Ray, launched with --set sinks=prometheus.",
        "tags": ["trainload"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Source",
                    "type": "datasource",
                    "query": "prometheus",
                    "refresh": 1,
                    "current": {},
                },
                {
                    "name": "run",
                    "label": "Run",
                    "type": "query",
                    "datasource": _SOURCE,
                    "definition": f"label_values({first}, run)",
                    "query": {"query": f"label_values({first}, run)", "refId": "run"},
                    "refresh": 2,
                    "sort": 1,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
                },
            ]
        },
        "panels": _place_panels(_panels()),
    }


def _query_per_run(measure: Measure, *more: str) -> str:
    """Return the query of a measure's value for each run; a run may have had several drivers."""
    by = ", ".join(("run", *more))
    return f"max by ({by}) ({_selector(measure)})"


def _selector(measure: Measure) -> str:
    return f'{measure.exported}{{run=~"$run"}}'


def _highest(measure: Measure, ending: str) -> str:
    """Return the query of the highest values of a measure whose tag `METRIC` ends like this."""
    selector = f'{measure.exported}{{run=~"$run", {METRIC}=~".*/{ending}"}}'
    return f"topk({_MOST_CURVES}, max by (run, {METRIC}) ({selector}))"


def _rate(measure: Measure) -> str:
    return f"sum by (run) (rate({_selector(measure)}[$__rate_interval]))"


def _panels() -> list[list[dict[str, Any]]]:
    """Return the panels of each row."""
    age = f"time() - {_query_per_run(CHECKPOINT_TIME)}"
    return [
        [
            _stat("Running", [(_query_per_run(RUNNING), "{{run}}")], "none", red_below=1.0),
            _stat(
                "Steps done",
                [(f"{_query_per_run(STEP)} / {_query_per_run(STEPS)}", "{{run}}")],
                "percentunit",
            ),
            _stat("Loss", [(_query_per_run(LOSS), "{{run}}")], "none"),
            _stat("Time since a checkpoint", [(age, "{{run}}")], "s"),
            _stat("Failures", [(_query_per_run(FAILURES), "{{run}}")], "none", red_above=1.0),
            _stat("Warnings", [(_query_per_run(WARNINGS), "{{run}}")], "none"),
        ],
        [
            _curve(
                "Loss",
                [
                    (_query_per_run(LOSS), "{{run}}"),
                    (_query_per_run(EVALUATION_LOSS), "{{run}}, evaluation"),
                ],
                "none",
            ),
            _curve(
                "Gradient norm",
                [
                    (_query_per_run(GRADIENT_NORM), "{{run}}"),
                    (_query_per_run(LOSS_SCALE), "{{run}}, loss scale"),
                ],
                "none",
            ),
        ],
        [
            _curve(
                "Throughput",
                [
                    (_query_per_run(TOKENS), "{{run}}, tokens/s"),
                    (_query_per_run(ROWS), "{{run}}, rows/s"),
                ],
                "short",
            ),
            _curve(
                "Waiting for data, share of the steps",
                [(f"{_rate(DATA_WAIT)} / {_rate(STEP_SECONDS)}", "{{run}}")],
                "percentunit",
            ),
        ],
        [
            _curve("Model FLOP/s utilisation", [(_query_per_run(MFU), "{{run}}")], "percentunit"),
            _curve("Memory, maximum over ranks", [(_query_per_run(MEMORY), "{{run}}")], "bytes"),
        ],
        [
            _curve(
                "Metrics",
                [(_query_per_run(METRICS, METRIC), f"{{{{run}}}}, {{{{{METRIC}}}}}")],
                "none",
            ),
            _curve(
                "Metrics of evaluations",
                [(_query_per_run(EVALUATION_METRICS, METRIC), f"{{{{run}}}}, {{{{{METRIC}}}}}")],
                "none",
            ),
        ],
        [
            _curve(
                "Updates over parameters, highest",
                [(_highest(STATISTICS, "ratio"), f"{{{{run}}}}, {{{{{METRIC}}}}}")],
                "none",
            ),
            _curve(
                "Activations, root mean square, highest",
                [(_highest(STATISTICS, "rms"), f"{{{{run}}}}, {{{{{METRIC}}}}}")],
                "none",
            ),
        ],
        [
            _curve(
                "Steps",
                [
                    (_query_per_run(STEP), "{{run}}"),
                    (_query_per_run(CHECKPOINT_STEP), "{{run}}, checkpoint"),
                ],
                "short",
            ),
            _curve("Time since a checkpoint", [(age, "{{run}}")], "s"),
        ],
        [
            _curve("Writing a checkpoint", [(_query_per_run(CHECKPOINT_SECONDS), "{{run}}")], "s"),
            _curve(
                "Size of a checkpoint", [(_query_per_run(CHECKPOINT_BYTES), "{{run}}")], "bytes"
            ),
            _curve(
                "Failures and warnings",
                [
                    (_query_per_run(FAILURES), "{{run}}, failures"),
                    (_query_per_run(WARNINGS), "{{run}}, warnings"),
                ],
                "none",
            ),
        ],
    ]


def _stat(
    title: str,
    queries: Sequence[tuple[str, str]],
    unit: str,
    *,
    red_above: float | None = None,
    red_below: float | None = None,
) -> dict[str, Any]:
    """Return a panel with the last values in large type."""
    steps: list[dict[str, Any]] = [{"color": "text" if red_below is None else "red", "value": None}]
    if red_above is not None:
        steps.append({"color": "red", "value": red_above})
    if red_below is not None:
        steps.append({"color": "green", "value": red_below})
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
    }
    return _panel(
        "stat",
        title,
        queries,
        unit,
        4,
        options,
        {"thresholds": {"mode": "absolute", "steps": steps}},
    )


def _curve(title: str, queries: Sequence[tuple[str, str]], unit: str) -> dict[str, Any]:
    """Return a panel with a time series."""
    options = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "none"},
    }
    return _panel(
        "timeseries",
        title,
        queries,
        unit,
        8,
        options,
        {"custom": {"lineWidth": 1, "fillOpacity": 5, "spanNulls": True}},
    )


def _panel(
    kind: str,
    title: str,
    queries: Sequence[tuple[str, str]],
    unit: str,
    height: int,
    options: dict[str, Any],
    defaults: dict[str, Any],
) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "range": kind != "stat",
                "instant": kind == "stat",
            }
            for number, (query, legend) in enumerate(queries)
        ],
        "options": options,
        "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
        "gridPos": {"x": 0, "y": 0, "w": _WIDTH, "h": height},
    }


def _place_panels(rows: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the panels with positions and ids; each row fills the width."""
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        width = _WIDTH // len(row)
        for column, panel in enumerate(row):
            place = {**panel["gridPos"], "x": column * width, "y": y, "w": width}
            placed.append({**panel, "id": len(placed) + 1, "gridPos": place})
        y += int(row[0]["gridPos"]["h"])
    return placed
