"""An OpenTelemetry collector that keeps what it is sent, or sits on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_stand_in import StandInHandler, serving


@dataclass
class CollectorStandIn:
    """What has come; each batch is answered ``seconds`` late."""

    seconds: float
    url: str = ""
    spans: list[Any] = field(default_factory=list)
    resources: list[Any] = field(default_factory=list)
    late: threading.Event = field(default_factory=threading.Event)


@contextmanager
def collector(seconds: float = 0.0) -> Iterator[CollectorStandIn]:
    there = CollectorStandIn(seconds)

    class Handler(StandInHandler):
        def answer(self) -> None:
            body = self.content()
            there.late.wait(seconds)
            assert self.path == "/v1/traces"
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                there.resources.append(each.resource)
                for scope in each.scope_spans:
                    there.spans.extend(scope.spans)
            self.say(200)

    with serving(Handler) as there.url:
        try:
            yield there
        finally:
            there.late.set()
