"""The engine's latest statistics, and what an API process knows of its engine, for Prometheus: by
names of its own, and by those that gateways and autoscalers know, for those that ask for them.

The endpoint picker of the Gateway API inference extension reads the queue and the use of the KV
cache under vLLM's names by default, and so do examples of KEDA and of Kubernetes' own autoscaler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lexshard.actors.messages import EngineStatistics
from lexshard.actors.statistic import Statistic, statistics_of
from lexshard.cluster.engine.supervisor import NOTHING_HEARD
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.seats import SharedCounters
from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.observability.http_metrics import RESTARTS, HttpCollector, buckets


class EngineCollector(Collector):
    """Reads the engine's latest statistics whenever Prometheus asks. While there are none nothing
    is told: zeros would be taken for a restart, and those of a dead engine for what is."""

    def __init__(
        self, client: EngineClient, admission: Admission, counters: SharedCounters
    ) -> None:
        self._client = client
        self._admission = admission
        self._counters = counters
        # What others have seen: this process's client begins at none.
        self._earlier_restarts = counters.largest(RESTARTS)

    def note_restarts(self) -> None:
        """Writes down what this process has seen, for others and its successor."""
        own = self._counters.own
        own[RESTARTS] = max(own[RESTARTS], self._earlier_restarts + self._client.restarts)

    def collect(self) -> Iterator[Metric]:
        self._admission.forget_the_dead()
        self.note_restarts()
        statistics = self._client.statistics
        if statistics is not NOTHING_HEARD:
            for name, declared in statistics_of(type(statistics)).items():
                yield _engine_metric(name, declared, getattr(statistics, name))
        gauges = {
            "lexshard_ready": (self._client.ready, "1 while the engine answers"),
            "lexshard_admitted_sequences": (
                self._admission.sequences,
                "Sequences admitted and not finished",
            ),
            "lexshard_admitted_waiting_tokens": (
                self._admission.waiting_tokens,
                "Admitted prompt tokens the engine has not computed",
            ),
        }
        for name, (value, description) in gauges.items():
            yield GaugeMetricFamily(name, description, value=float(value))
        restarts = self._counters.largest(RESTARTS)
        yield CounterMetricFamily(
            "lexshard_engine_restarts", "Engines lost and replaced", value=restarts
        )


def _engine_metric(name: str, declared: Statistic, value: Any) -> Metric:
    """``value`` is a number, or counts by the declared label."""
    full_name = f"lexshard_{name}"
    if declared.bounds and declared.label is not None:
        histogram = HistogramMetricFamily(full_name, declared.description, labels=(declared.label,))
        for label, (*counts, total) in sorted(value.items()):
            if any(counts):
                histogram.add_metric((label,), buckets(declared.bounds, counts), total)
        return histogram
    family = GaugeMetricFamily if declared.gauge else CounterMetricFamily
    if declared.label is None:
        return family(full_name, declared.description, value=value)
    metric = family(full_name, declared.description, labels=(declared.label,))
    for label, count in sorted(value.items()):
        metric.add_metric((label,), count)
    return metric


# Histograms of the HTTP edge by the peer's name.
HISTOGRAMS: Mapping[str, str] = {
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "request_seconds",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_prefill_time_seconds": "prefill_seconds",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_output_tokens",
}


class PeerNames(Collector):
    """What is told under lexshard's own names, once more."""

    def __init__(self, client: EngineClient, http: HttpCollector) -> None:
        self._client = client
        self._http = http

    def collect(self) -> Iterator[Metric]:
        if self._client.statistics is not NOTHING_HEARD:
            yield from self._of_engine(self._client.statistics)
        total = self._http.counters.total()
        for name, own in HISTOGRAMS.items():
            histogram = self._http.histograms[own]
            yield histogram.family(total, name, histogram.name)

    def _of_engine(self, told: EngineStatistics) -> Iterator[Metric]:
        used = told.kv_blocks_used / max(1, told.kv_blocks_total)
        gauges = {
            "vllm:num_requests_running": (float(told.running), "lexshard_running"),
            "vllm:num_requests_waiting": (float(told.waiting), "lexshard_waiting"),
            "vllm:kv_cache_usage_perc": (used, "KV blocks in use, 1 is all of them"),
            "vllm:gpu_cache_usage_perc": (used, "vllm:kv_cache_usage_perc under its older name"),
        }
        for name, (value, description) in gauges.items():
            yield GaugeMetricFamily(name, description, value=value)
        counters = {
            "prompt_tokens": (told.prompt_tokens, "prompt_tokens"),
            "generation_tokens": (told.generated_tokens, "generated_tokens"),
            "num_preemptions": (told.preemptions, "preemptions"),
            "prefix_cache_queries": (told.finished_prompt_tokens, "finished_prompt_tokens"),
            "prefix_cache_hits": (told.cached_prompt_tokens, "cached_prompt_tokens"),
        }
        for name, (count, own) in counters.items():
            yield CounterMetricFamily(f"vllm:{name}", f"lexshard_{own}_total", value=count)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV cache, in the labels",
            labels=("block_size", "num_gpu_blocks"),
        )
        if self._client.ready:
            block = self._client.information.kv_tokens // max(1, self._client.information.kv_blocks)
            cache.add_metric((str(block), str(told.kv_blocks_total)), 1.0)
        yield cache
