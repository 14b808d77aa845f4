"""A sink that exports a run as spans and metrics to an OpenTelemetry collector, over OTLP and HTTP.

The variables of the library configure it: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_SERVICE_NAME (default: trainload), OTEL_RESOURCE_ATTRIBUTES, OTEL_METRIC_EXPORT_INTERVAL and so
on. If TRACEPARENT is set, the run is a part of that trace.
"""

from __future__ import annotations

import logging
import math
import os
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trainload.core.errors import StorageError
from trainload.launching.run.journal import Event, stream_events
from trainload.launching.run.run_state import Summary
from trainload.launching.sinks.measures import OF_TEXTS, RUNNING, STEPS, Measure, measured
from trainload.launching.sinks.protocol import Outcome
from trainload.launching.sinks.run_parameters import parameters_of

_SCOPE = "trainload"
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL = 60_000.0
"""Milliseconds between two exports of metrics, as OpenTelemetry specifies it."""
_PAUSE = 10.0
"""Seconds until spans that the collector did not accept are exported again."""
_MAX_SPANS = 2048
"""Number of the latest spans that are kept while the collector is unavailable."""
_ATTRIBUTE = str | int | float | bool
_ENDS_ATTEMPT = frozenset({"failure", "end", "stopped", "failed"})
_LONGEST = 5000


class OpenTelemetry:
    """A `Sink` for OpenTelemetry.

    Each driver of a run makes a trace: the span `run` is the parent of a span for each `attempt`,
    and an attempt is that of its `checkpoint` and `evaluation` spans. Failures and warnings are
    events of the attempt. Spans are exported as soon as they end.

    Everything is exported by the thread of the sink. The processors of the library have threads of
    their own, which they start again in every process that the driver forks, and only log failures.
    """

    def __init__(self, run_dir: Path) -> None:
        # failures are reported as warnings of the run, so without a configuration of logging they
        # are not printed as well
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        parameters = parameters_of(run_dir)
        described: dict[str, _ATTRIBUTE] = {"trainload.run": run_dir.name}
        for key, value in parameters.items():
            described[f"trainload.{key}"] = value if isinstance(value, _ATTRIBUTE) else str(value)
        name = {} if _names_service() else {"service.name": "trainload"}
        resource = Resource.create({**name, **described})
        self._spans = _Spans(OTLPSpanExporter())
        self._tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracing.add_span_processor(self._spans)
        self._tracer = self._tracing.get_tracer(_SCOPE)
        self._reader = _Metrics(OTLPMetricExporter())
        self._metering = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._metering.get_meter(_SCOPE)
        self._instruments: dict[Measure, Any] = {}
        summary = Summary.of(stream_events(run_dir))
        self._counts = {"failure": summary.failures, "warning": summary.warnings}
        carrier = {"traceparent": os.environ.get("TRACEPARENT", "")}
        outer = TraceContextTextMapPropagator().extract(carrier)
        self._run = self._tracer.start_span("run", outer, attributes=described)
        self._attempt: Span | None = None
        self._record(RUNNING, 1.0)
        self._record(STEPS, float(parameters["steps"]))
        for kind, count in self._counts.items():
            self._record(OF_TEXTS[kind], float(count))
        self._exported = clock.monotonic()

    def event(self, event: Event, step: int) -> None:
        time, data = _nanoseconds(event.time), event.data
        if event.kind == "start":
            self._end_attempt(time)
            self._attempt = self._start("attempt", self._run, time, _plain(data))
        elif event.kind in ("checkpoint", "eval"):
            name = "evaluation" if event.kind == "eval" else "checkpoint"
            began = time - _nanoseconds(float(data.get("seconds", 0.0)))
            parent = self._attempt or self._run
            self._start(name, parent, began, {"step": step, **_plain(data)}).end(time)
        elif "message" in data:
            span = self._attempt or self._run
            message = str(data["message"])[:_LONGEST]
            span.add_event(event.kind, {**_plain(data), "message": message, "step": step}, time)
            if event.kind in ("failure", "failed"):
                span.set_status(Status(StatusCode.ERROR, message))
        if event.kind in _ENDS_ATTEMPT:
            self._end_attempt(time)
        self._spans.export()

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        for measure, own, value in measured(values, step, time):
            self._record(measure, value, own)
        if clock.monotonic() - self._exported >= _interval():
            self._export_metrics()

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        if kind in self._counts:
            self._counts[kind] += 1
            self._record(OF_TEXTS[kind], float(self._counts[kind]))

    def close(self, outcome: Outcome, /) -> None:
        now = clock.time_ns()
        self._end_attempt(now)
        self._run.set_attribute("trainload.outcome", outcome)
        if outcome == "failed":
            self._run.set_status(StatusCode.ERROR)
        self._run.end(now)
        self._record(RUNNING, 0.0)
        try:
            self._spans.export(is_last=True)
            self._export_metrics()
        finally:
            self._tracing.shutdown()
            self._metering.shutdown()

    def _start(
        self, name: str, parent: Span, time: int, attributes: Mapping[str, _ATTRIBUTE]
    ) -> Span:
        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=time)

    def _end_attempt(self, time: int) -> None:
        if self._attempt is not None:
            self._attempt.end(time)
        self._attempt = None

    def _record(self, measure: Measure, value: float, own: str = "") -> None:
        """Set a gauge or increase a counter; non-finite values are ignored.

        `own` is the name of one of the job's metrics.
        """
        if not math.isfinite(value):
            return
        if measure not in self._instruments:
            is_gauge = measure.kind == "gauge"
            make = self._meter.create_gauge if is_gauge else self._meter.create_counter
            self._instruments[measure] = make(measure.dotted, measure.unit, measure.description)
        instrument, attributes = self._instruments[measure], {"metric": own} if measure.own else {}
        if measure.kind == "gauge":
            instrument.set(value, attributes)
        elif value > 0:
            instrument.add(value, attributes)

    def _export_metrics(self) -> None:
        self._exported = clock.monotonic()
        self._reader.collect()
        self._reader.check_accepted()


class _Spans(SpanProcessor):
    """Ended spans that were not exported yet."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended: list[ReadableSpan] = []
        self._refused: float | None = None

    def on_end(self, span: ReadableSpan) -> None:
        self._ended = [*self._ended[1 - _MAX_SPANS :], span]

    def export(self, *, is_last: bool = False) -> None:
        """Export the spans, unless that has just failed.

        Raises:
            StorageError: the collector does not accept them; they are kept.
        """
        now = clock.monotonic()
        is_pausing = self._refused is not None and now < self._refused + _PAUSE and not is_last
        if not self._ended and not is_pausing:
            return
        if is_pausing or self._exporter.export(self._ended) is not SpanExportResult.SUCCESS:
            self._refused = self._refused if is_pausing else now
            raise _refusal("spans")
        self._ended, self._refused = [], None

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Metrics(MetricReader):
    """Exports all metrics whenever they are collected."""

    def __init__(self, exporter: MetricExporter) -> None:
        # as the library's own reader, which is the only user of an exporter's preferences
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._is_accepted = True

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_others: Any
    ) -> None:
        result = self._exporter.export(metrics_data, timeout_millis)
        self._is_accepted = result is MetricExportResult.SUCCESS

    def check_accepted(self) -> None:
        """Raise StorageError if the collector did not accept the last metrics."""
        if not self._is_accepted:
            raise _refusal("metrics")

    def shutdown(self, timeout_millis: float = 30_000, **_others: Any) -> None:
        self._exporter.shutdown(timeout_millis)


def _refusal(what: str) -> StorageError:
    return StorageError(
        f"the OpenTelemetry collector did not accept {what}",
        where="OTEL_EXPORTER_OTLP_ENDPOINT",
        got=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"),
    )


def _names_service() -> bool:
    return "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )


def _interval() -> float:
    return float(os.environ.get(_INTERVAL, _DEFAULT_INTERVAL)) / 1000


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _plain(data: Mapping[str, Any]) -> dict[str, _ATTRIBUTE]:
    """Return those values of an event that a span can have as attributes."""
    return {
        name: value
        for name, value in data.items()
        if isinstance(value, _ATTRIBUTE) and name != "message"
    }
