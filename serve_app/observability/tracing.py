"""Spans of requests, whose parts are made from what is remembered of them when they have ended.

Nothing is measured for them while a request runs, and a thread of OpenTelemetry's own sends them:
when a collector is slow or gone, spans are dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from lexshard.serve_app.request_record import RequestRecord

EXPORT_SECONDS = 5.0
FAREWELL_SECONDS = 1.0
# Spans that wait for the collector, and how many go at once: encoding them takes the interpreter,
# a fifth of a millisecond for 32.
MOST_WAITING, MOST_AT_ONCE = 4096, 32
UNTRACED = ("/health", "/metrics", "/version")
_NANOSECONDS = 1_000_000_000


class Tracing:
    """Makes the spans of one API process and sends them to ``endpoint``, a collector's URL.

    Which requests are traced is OpenTelemetry's own choice (``OTEL_TRACES_SAMPLER``): all, unless a
    caller says that its trace is not sampled. ``paths`` name spans; a path that is none of them
    does not.
    """

    def __init__(
        self, endpoint: str, labels: Mapping[str, str], version: str, paths: tuple[str, ...]
    ) -> None:
        self._paths = paths
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "lexshard"),
                "service.version": version,
                "process.pid": os.getpid(),
                **{f"lexshard.{name}": value for name, value in labels.items()},
            }
        )
        # One line for each batch that is dropped would fill a log.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_SECONDS),
                max_queue_size=MOST_WAITING,
                schedule_delay_millis=1000,
                max_export_batch_size=MOST_AT_ONCE,
            )
        )
        self._tracer = self._provider.get_tracer("lexshard", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Gives a request its span, in its caller's trace or one of its own."""
        if record.path in UNTRACED:
            return
        named = record.path in self._paths
        record.trace = self._tracer.start_span(
            f"{record.method} {record.path}" if named else record.method,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            start_time=_wall_clock(record.start_time),
        )

    def end(self, record: RequestRecord) -> None:
        """Ends the span of a request that has been answered, and makes those inside it."""
        root = record.trace
        if root is None or not root.is_recording():
            return
        self._add_parts(record, root)
        root.set_attributes(_attributes(record))
        if record.status >= 500:
            root.set_status(StatusCode.ERROR)
        root.end()

    def close(self) -> None:
        """Sends what waits, for at most a second: a collector that is gone keeps nothing here."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(FAREWELL_SECONDS)

    def _add_parts(self, record: RequestRecord, root: Span) -> None:
        """The parts of a request that has had tokens. Sums of many short times are shown as one
        from where the first of them can have been."""
        began, ended, pieces = record.began, record.ended, record.piece_times
        if began is None or ended is None or not pieces:
            return

        def part(name: str, parent: Span, start: float, end: float, summed: bool = False) -> Span:
            told: dict[str, Any] = {
                "lexshard.request_id": record.request_id,
                "lexshard.summed": summed,
            }
            within = set_span_in_context(parent)
            at = offset + int(start * _NANOSECONDS)
            span = self._tracer.start_span(name, within, attributes=told, start_time=at)
            span.end(offset + int(end * _NANOSECONDS))
            return span

        offset = _wall_clock(0.0)
        first, last = pieces[0], pieces[-1]
        prefilled = first - began.prefill
        part("queue", root, prefilled - began.queued, prefilled)
        part("prefill", root, prefilled, first)
        decode = part("decode", root, first, last)
        for name, seconds in (("verify", ended.verify), ("exchange", ended.exchange)):
            if seconds:
                part(name, decode, first, first + seconds, summed=True)


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans: ``endpoint``, completed where it names none of its paths."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _wall_clock(moment: float) -> int:
    """Of ``time.monotonic``'s seconds, in nanoseconds."""
    return time.time_ns() + int((moment - time.monotonic()) * _NANOSECONDS)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    told: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path[:200],
        "http.response.status_code": record.status,
        "lexshard.request_id": record.request_id,
    }
    first = record.seconds_to_first_token
    if first is not None:
        told["gen_ai.usage.input_tokens"] = record.prompt_tokens
        told["gen_ai.usage.output_tokens"] = record.completion_tokens
        told["lexshard.time_to_first_token"] = first
    return told
