"""An OpenTelemetry collector that keeps what it is sent, or sits on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class CollectorStandIn(ThreadingHTTPServer):
    """``spans`` is what has come; with ``seconds`` each batch is answered so late."""

    daemon_threads = True

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.late = threading.Event()
        self.seconds = seconds

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: CollectorStandIn

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.late.wait(self.server.seconds)
        assert self.path == "/v1/traces"
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append(each.resource)
            for scope in each.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def collector(seconds: float = 0.0) -> Iterator[CollectorStandIn]:
    server = CollectorStandIn(seconds)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.late.set()
        server.shutdown()
        thread.join()
        server.server_close()
