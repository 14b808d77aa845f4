"""A sink that exports a run's numbers as metrics of its Ray cluster, from whose endpoints
Prometheus scrapes them.

A launch imports this module before it has decided whether Ray presents a token, so the module does
not import Ray at its top (`launching.cluster.connection`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError
from trainload.launching.run.journal import stream_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.run.run_state import Summary
from trainload.launching.sinks.measures import (
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    MEASURES,
    METRIC,
    OF_TEXTS,
    RUNNING,
    STEPS,
    TAGS,
    Measure,
    measured,
)
from trainload.launching.sinks.protocol import Outcome

if find_spec("ray") is None:
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

_DIGITS = 12
_REPEAT_SECONDS = 5.0


class Prometheus:
    """A `Sink` for Prometheus. Ray exports metrics every ten seconds by default.

    Ray forgets a gauge that was not set again since its last export: a step count that was set once
    was gone from the endpoint after 20 seconds. So a thread sets all gauges again every 5 seconds
    until the sink is closed. After that the numbers vanish from the endpoints within half a minute,
    and only Prometheus has them.

    Raises:
        StorageError: this process is not connected to a cluster.
    """

    def __init__(self, run_dir: Path) -> None:
        import ray

        if not ray.is_initialized():
            raise StorageError(
                "prometheus requires Ray",
                where="sinks",
                got="no cluster",
                hint="Launch on Ray, or omit it.",
            )
        spec = read_spec(run_dir)
        tags = {"run": run_dir.name, "package": (spec.digest or spec.plan.package)[:_DIGITS]}
        assert tuple(tags) == TAGS
        self._metrics = {measure: _make_metric(measure, tags) for measure in MEASURES}
        self._lock = threading.Lock()
        self._gauges: dict[tuple[Measure, str], float] = {}
        self._closed = threading.Event()
        summary = Summary.of(stream_events(run_dir))
        self._counts = {"failure": summary.failures, "warning": summary.warnings}
        self._record(RUNNING, 1.0)
        self._record(STEPS, float(spec.steps))
        for kind, count in self._counts.items():
            self._record(OF_TEXTS[kind], float(count))
        if summary.checkpoint is not None and summary.checkpoint_time is not None:
            self._record(CHECKPOINT_STEP, float(summary.checkpoint))
            self._record(CHECKPOINT_TIME, summary.checkpoint_time)
        self._thread = threading.Thread(
            target=self._repeat_gauges, name="prometheus gauges", daemon=True
        )
        self._thread.start()

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        for measure, own, value in measured(values, step, time):
            self._record(measure, value, own)

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        if kind in self._counts:
            self._counts[kind] += 1
            self._record(OF_TEXTS[kind], float(self._counts[kind]))

    def close(self, _outcome: Outcome, /) -> None:
        self._closed.set()
        self._thread.join()
        self._record(RUNNING, 0.0)
        # so that the last export has all numbers, even if the run ends between two exports
        self._set_all()

    def _record(self, measure: Measure, value: float, own: str = "") -> None:
        """Set a gauge or increase a counter; non-finite values are ignored.

        `own` is the name of one of the job's metrics.
        """
        metric = self._metrics[measure]
        if not math.isfinite(value):
            return
        if measure.kind == "counter":
            if value > 0:
                metric.inc(value)
            return
        with self._lock:
            self._gauges[measure, own] = value
            self._set(measure, own, value)

    def _set(self, measure: Measure, own: str, value: float) -> None:
        self._metrics[measure].set(value, {METRIC: own} if measure.own else {})

    def _repeat_gauges(self) -> None:
        while not self._closed.wait(_REPEAT_SECONDS):
            self._set_all()

    def _set_all(self) -> None:
        with self._lock:
            for (measure, own), value in self._gauges.items():
                self._set(measure, own, value)


def _make_metric(measure: Measure, tags: dict[str, str]) -> Any:
    from ray.util.metrics import Counter, Gauge

    keys = (*tags, METRIC) if measure.own else tuple(tags)
    metric = (Gauge if measure.kind == "gauge" else Counter)(
        measure.name, measure.description, tag_keys=keys
    )
    metric.set_default_tags(tags)
    return metric
