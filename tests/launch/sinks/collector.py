"""A collector that speaks OTLP over HTTP on loopback."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Spans and metrics that were exported.

    Attributes:
        spans: spans in the order of their export.
        resources: attributes of the resources of all requests.
        values: (name of a metric, its attribute `metric`) -> last value.
        units: name of a metric -> its unit.
        headers: headers of all requests.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.values: dict[tuple[str, str], float] = {}
        self.units: dict[str, str] = {}
        self.headers: list[dict[str, str]] = []

    def span(self, name: str) -> Span:
        """Return the only span of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def take_spans(self, request: ExportTraceServiceRequest) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()

    def take_metrics(self, request: ExportMetricsServiceRequest) -> ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            self.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.units[metric.name] = metric.unit
                    for point in (*metric.gauge.data_points, *metric.sum.data_points):
                        own = plain(point.attributes).get("metric", "")
                        self.values[metric.name, own] = point.as_double
        return ExportMetricsServiceResponse()


def plain(attributes: Any) -> dict[str, Any]:
    """Return the attributes of a message."""

    def value_of(entry: KeyValue) -> Any:
        return getattr(entry.value, entry.value.WhichOneof("value") or "string_value")

    return {entry.key: value_of(entry) for entry in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector within the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append(dict(self.headers))
            response: Any
            if self.path == "/v1/traces":
                response = collector.take_spans(ExportTraceServiceRequest.FromString(body))
            else:
                assert self.path == "/v1/metrics"
                response = collector.take_metrics(ExportMetricsServiceRequest.FromString(body))
            answer = response.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
