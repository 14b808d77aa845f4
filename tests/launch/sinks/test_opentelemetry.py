"""Runs as OpenTelemetry spans and metrics, received by a collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.launch.sinks.collector import Collector, collecting, plain
from tests.launch.sinks.test_prometheus import every_measure
from tests.report.made import made_run

import trainload
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.sinks.measures import MEASURES
from trainload.launching.sinks.sink import open_sinks
from trainload.packaging.package import Package


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made_run(tmp_path / "first", [], digest="a" * 64)


def send(run_dir: Path, *events: Event) -> list[Event]:
    heard: list[Event] = []
    with open_sinks(["opentelemetry"], run_dir, heard.append) as tell:
        for event in events:
            tell(event)
    return heard


def test_a_run_is_spans_and_metrics(
    collector: Collector, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=tmp_path / "run",
        steps=4,
        checkpoint_every=2,
        eval_data=tiny_data,
        compile=False,
        backend="local",
        sinks=["opentelemetry"],
    )
    names = sorted(span.name for span in collector.spans)
    assert names == [*["attempt"], *["checkpoint"] * 2, *["evaluation"] * 2, "run"]
    run, attempt = collector.span("run"), collector.span("attempt")
    assert attempt.parent_span_id == run.span_id
    inner = [span for span in collector.spans if span.name in ("checkpoint", "evaluation")]
    assert {span.parent_span_id for span in inner} == {attempt.span_id}
    assert {span.trace_id for span in collector.spans} == {run.trace_id}
    assert plain(run.attributes)["trainload.outcome"] == "ended"
    last = losses(read_events(tmp_path / "run"))[-1]
    assert collector.values["trainload.loss", ""] == pytest.approx(last)
    assert collector.values["trainload.step", ""] == 4


def test_every_measure_is_exported_with_its_unit(collector: Collector, run_dir: Path) -> None:
    send(run_dir, *every_measure(6))
    assert collector.units == {measure.dotted: measure.unit for measure in MEASURES}
    assert collector.values["trainload.metric", "accuracy"] == 0.75


def test_each_attempt_is_a_span_and_a_failure_is_its_error(
    collector: Collector, run_dir: Path
) -> None:
    failure = {"message": "rank 1 died", "ranks": [1], "attempt": 1, "action": "it restarts"}
    send(
        run_dir,
        Event("start", {"step": 0, "attempt": 1}, 100.0),
        Event("failure", failure, 130.0),
        Event("start", {"step": 0, "attempt": 2}, 140.0),
        Event("checkpoint", {"step": 5, "seconds": 2.0, "bytes": 10}, 150.0),
        Event("end", {"step": 5, "steps": 5}, 160.0),
    )
    first, second = [span for span in collector.spans if span.name == "attempt"]
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (100 * 10**9, 130 * 10**9)
    assert (first.status.code, first.status.message) == (Status.STATUS_CODE_ERROR, "rank 1 died")
    assert [event.name for event in first.events] == ["failure"]
    assert second.status.code == Status.STATUS_CODE_UNSET
    checkpoint = collector.span("checkpoint")
    assert checkpoint.start_time_unix_nano == 148 * 10**9
    assert plain(checkpoint.attributes) == {"step": 5, "seconds": 2.0, "bytes": 10}


def test_the_variables_of_the_library_configure_the_sink(
    collector: Collector, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=search")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=one")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("TRACEPARENT", f"00-{trace}-b7ad6b7169203331-01")
    send(run_dir, Event("end", {"step": 1, "steps": 1}, 1.0))
    resource = collector.resources[0]
    assert (resource["service.name"], resource["team"]) == ("nightly", "search")
    assert resource["trainload.run"] == "first"
    assert {headers["authorization"] for headers in collector.headers} == {"one"}
    assert collector.span("run").trace_id.hex() == trace


def test_failures_of_earlier_drivers_are_counted(collector: Collector, tmp_path: Path) -> None:
    failure = {"message": "rank 1 died", "ranks": [1], "attempt": 1, "action": "it restarts"}
    before = [Event("failure", failure, 1.0)]
    send(made_run(tmp_path / "second", before, digest="a" * 64))
    assert collector.values["trainload.failures", ""] == 1


def test_the_service_is_called_trainload_by_default(collector: Collector, run_dir: Path) -> None:
    send(run_dir)
    assert {each["service.name"] for each in collector.resources} == {"trainload"}


def test_spans_that_the_collector_did_not_accept_are_exported_later(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainload.launching.sinks import opentelemetry

    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        sink = opentelemetry.OpenTelemetry(run_dir)
        working = sink._spans._exporter
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
        sink._spans._exporter = OTLPSpanExporter()
        with pytest.raises(trainload.StorageError, match="did not accept spans"):
            sink.event(Event("checkpoint", {"step": 5, "seconds": 2.0, "bytes": 10}, 150.0), 5)
        sink._spans._exporter = working
        sink.close("ended")
    assert sorted(span.name for span in collector.spans) == ["checkpoint", "run"]
