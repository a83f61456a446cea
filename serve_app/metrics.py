"""``/metrics``: the engine's counters and those of the HTTP edge, as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.admission import Admission
from serve_app.engine_client import EngineClient
from serve_app.request_record import RequestRecord

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Of the engine's statistics these are states; all others only ever grow.
ENGINE_GAUGES = {"running", "waiting", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached"}
# Statistics that are counts by something: the name of their label.
ENGINE_LABELS = {"head_rows_by_tier": "tier"}
ENGINE_DESCRIPTIONS = {
    "steps": "Engine steps",
    "running": "Sequences that hold KV blocks",
    "waiting": "Sequences that wait for KV blocks or a place in a step",
    "kv_blocks_total": "KV blocks there are",
    "kv_blocks_used": "KV blocks held by running sequences",
    "kv_blocks_cached": "Free KV blocks that still hold a prefix",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens drawn",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache",
    "preemptions": "Sequences that gave up their KV blocks to others",
    "finished": "Sequences that came to their end",
    "cancelled": "Sequences whose client left or had enough",
    "body_seconds": "Seconds in the model body",
    "head_seconds": "Seconds in the output head",
    "decide_seconds": "Seconds the engine's loop spent on decisions: asking, waiting, deciding",
    "sampler_busy_seconds": "Seconds samplers spent deciding, summed over the samplers",
    "sampler_wait_seconds": "Seconds the engine's loop waited for samplers",
    "sampler_hidden_seconds": "Seconds of the busiest sampler of each step nobody waited for",
    "samplers_lost": "Samplers that died and were replaced",
    "head_rows": "Rows (one token of one sequence each) the output head has decided",
    "head_certified_rows": "Head rows decided by a certificate, not by every exact logit",
    "head_rescored_rows": "Exact logits computed, summed over the head rows",
    "head_opened_share": "Share of the vocabulary (0 to 1) whose exact logits were computed, "
    "summed over the head rows",
    "head_tightness": "Best exact logit over best upper bound (0 to 1), "
    "summed over the head rows that have one",
    "head_tightness_rows": "Head rows that have a tightness",
    "head_bytes": "Bytes of output weights, exact and low-precision, read by the head",
    "head_fallbacks": "Head rows for which a cheaper way was tried first and did not suffice",
    "head_rows_by_tier": "Head rows by what they were screened with",
}


class EngineCollector(Collector):
    """Reads the engine's latest statistics whenever Prometheus asks."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._client = client
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        statistics = self._client.statistics
        for field in fields(statistics):
            yield _engine_metric(field.name, getattr(statistics, field.name))
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


def _engine_metric(name: str, value: float | Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily if name in ENGINE_GAUGES else CounterMetricFamily
    full_name, description = f"lexshard_{name}", ENGINE_DESCRIPTIONS[name]
    if not isinstance(value, Mapping):
        return family(full_name, description, value=value)
    metric = family(full_name, description, labels=(ENGINE_LABELS[name],))
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
