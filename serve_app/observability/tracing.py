"""Spans of requests, made from what is remembered of them when they have ended.

Nothing is measured for them while a request runs, and a thread of OpenTelemetry's own sends them:
when a collector is slow or gone, spans are dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from lexshard.serve_app.observability.trace_context import (
    TRACEPARENT,
    TRACESTATE,
    RemoteParent,
    TraceContext,
    new_span_id,
    new_trace_id,
    read_parent,
)
from lexshard.serve_app.request_record import RequestRecord

EXPORT_SECONDS = 5.0
FAREWELL_SECONDS = 1.0
# Spans that wait for the collector, and how many go at once: encoding them takes the interpreter,
# a fifth of a millisecond for 32.
MOST_WAITING, MOST_AT_ONCE = 4096, 32
UNTRACED = ("/health", "/metrics", "/version")
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Part:
    """A span inside a request's: seconds of the monotonic clock. ``summed``: it is a sum of many
    short times, shown as one from where the first of them can have been."""

    name: str
    start: float
    end: float
    summed: bool = False


class Tracing:
    """Makes the spans of one API process and sends them to ``endpoint``, a collector's URL.

    Which requests are traced is OpenTelemetry's own choice (``OTEL_TRACES_SAMPLER``): all, unless a
    caller says that its trace is not sampled. ``paths`` name spans; a path that is none of them
    does not. ``exporter`` stands in the place of OTLP over HTTP.
    """

    def __init__(
        self,
        endpoint: str,
        labels: Mapping[str, str],
        version: str,
        paths: tuple[str, ...],
        exporter: SpanExporter | None = None,
    ) -> None:
        self._paths = paths
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "lexshard"),
                "service.version": version,
                "process.pid": os.getpid(),
                **{f"lexshard.{name}": value for name, value in labels.items()},
            }
        )
        self._scope = InstrumentationScope("lexshard", version)
        # One line for each batch that is dropped would fill a log.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._processor = BatchSpanProcessor(
            exporter or OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_SECONDS),
            max_queue_size=MOST_WAITING,
            schedule_delay_millis=1000,
            max_export_batch_size=MOST_AT_ONCE,
        )

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Gives a request its place in a trace: the caller's, or one of its own."""
        if record.path in UNTRACED:
            return
        parent = read_parent(headers.get(TRACEPARENT), headers.get(TRACESTATE))
        trace_id = new_trace_id() if parent is None else parent.trace_id
        context = None
        if parent is not None:
            context = trace.set_span_in_context(NonRecordingSpan(_remote(parent)))
        decision = self._sampler.should_sample(context, trace_id, self._name(record)).decision
        record.trace = TraceContext(trace_id, new_span_id(), decision.is_sampled(), parent)

    def end(self, record: RequestRecord) -> None:
        """Makes the spans of a request that has been answered."""
        own = record.trace
        if own is None or not own.sampled:
            return
        now = time.monotonic()
        wall_clock = time.time_ns() - int(now * _NANOSECONDS)
        root = _local(own, own.span_id)
        parent = None if own.parent is None else _remote(own.parent)
        whole = _Part(self._name(record), record.start_time, now)
        failed = Status(StatusCode.ERROR) if record.status >= 500 else Status()
        self._emit(whole, root, parent, wall_clock, SpanKind.SERVER, failed, _attributes(record))
        inside: dict[str | None, SpanContext] = {None: root}
        for part, within in _parts(record):
            context = inside[part.name] = _local(own, new_span_id())
            told = {"lexshard.request_id": record.request_id, "lexshard.summed": part.summed}
            self._emit(part, context, inside[within], wall_clock, SpanKind.INTERNAL, Status(), told)

    def close(self) -> None:
        """Sends what waits, for at most a second: a collector that is gone keeps nothing here."""
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(FAREWELL_SECONDS)

    def _name(self, record: RequestRecord) -> str:
        return f"{record.method} {record.path}" if record.path in self._paths else record.method

    def _emit(
        self,
        part: _Part,
        context: SpanContext,
        parent: SpanContext | None,
        wall_clock: int,
        kind: SpanKind,
        status: Status,
        attributes: dict[str, Any],
    ) -> None:
        self._processor.on_end(
            ReadableSpan(
                name=part.name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=attributes,
                kind=kind,
                status=status,
                start_time=wall_clock + int(part.start * _NANOSECONDS),
                end_time=wall_clock + int(part.end * _NANOSECONDS),
                instrumentation_scope=self._scope,
            )
        )


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans: ``endpoint``, completed where it names none of its paths."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _parts(record: RequestRecord) -> Iterator[tuple[_Part, str | None]]:
    """The parts of a request that has had tokens, each with the name of the one it is inside."""
    began, ended, pieces = record.began, record.ended, record.piece_times
    if began is None or ended is None or not pieces:
        return
    first, last = pieces[0], pieces[-1]
    prefilled = first - began.prefill
    yield _Part("queue", prefilled - began.queued, prefilled), None
    yield _Part("prefill", prefilled, first), None
    yield _Part("decode", first, last), None
    for name, seconds in (("verify", ended.verify), ("exchange", ended.exchange)):
        if seconds:
            yield _Part(name, first, first + seconds, summed=True), "decode"


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


def _local(own: TraceContext, span_id: int) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    state = "" if own.parent is None else own.parent.state
    return SpanContext(own.trace_id, span_id, False, flags, TraceState.from_header([state]))


def _remote(parent: RemoteParent) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([parent.state])
    return SpanContext(parent.trace_id, parent.span_id, True, flags, state)
