"""``/metrics``: the engine's counters and those of the HTTP edge, as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.messages import EngineStatistics
from actors.statistic import Statistic, statistics_of
from serve_app.admission import Admission
from serve_app.engine_client import EngineClient
from serve_app.request_record import RequestRecord

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineCollector(Collector):
    """Reads the engine's latest statistics whenever Prometheus asks."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._client = client
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        statistics = self._client.statistics
        for name, declared in statistics_of(EngineStatistics).items():
            yield _engine_metric(name, declared, getattr(statistics, name))
        yield GaugeMetricFamily(
            "lexshard_ready", "1 while the engine answers", value=float(self._client.ready)
        )
        yield CounterMetricFamily(
            "lexshard_engine_restarts", "Engines lost and replaced", value=self._client.restarts
        )
        yield GaugeMetricFamily(
            "lexshard_admitted_sequences",
            "Sequences admitted and not finished",
            value=self._admission.sequences,
        )
        yield GaugeMetricFamily(
            "lexshard_admitted_waiting_tokens",
            "Admitted prompt tokens the engine has not computed",
            value=self._admission.waiting_tokens,
        )


def _engine_metric(name: str, declared: Statistic, value: Any) -> Metric:
    """``value`` is a number, or counts by the declared label."""
    family = GaugeMetricFamily if declared.gauge else CounterMetricFamily
    full_name = f"lexshard_{name}"
    if declared.label is None:
        return family(full_name, declared.description, value=value)
    metric = family(full_name, declared.description, labels=(declared.label,))
    for label, count in sorted(value.items()):
        metric.add_metric((label,), count)
    return metric


class ServerMetrics:
    """Counts finished HTTP requests. ``path`` labels are the served routes and 'other'."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(EngineCollector(client, admission))
        self._requests = Counter(
            "lexshard_http_requests",
            "HTTP requests answered; status 499 is a client that left",
            ("method", "path", "status"),
            registry=registry,
        )
        self._tokens = Counter(
            "lexshard_http_tokens", "Tokens of answered requests", ("kind",), registry=registry
        )
        self._duration = Histogram(
            "lexshard_request_seconds",
            "From request to last token",
            buckets=SECONDS,
            registry=registry,
        )
        self._first_token = Histogram(
            "lexshard_time_to_first_token_seconds",
            "From request to first token",
            buckets=SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "lexshard_time_per_output_token_seconds",
            "Mean time per token after the first",
            buckets=SECONDS_PER_TOKEN,
            registry=registry,
        )

    def observe(self, record: RequestRecord, path: str) -> None:
        method = record.method if record.method in ("GET", "POST") else "other"
        self._requests.labels(method, path, str(record.status)).inc()
        first = record.seconds_to_first_token
        if first is None:
            return
        seconds = record.seconds
        self._tokens.labels("prompt").inc(record.prompt_tokens)
        self._tokens.labels("completion").inc(record.completion_tokens)
        self._duration.observe(seconds)
        self._first_token.observe(first)
        if record.completion_tokens > 1:
            self._per_token.observe((seconds - first) / (record.completion_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)
