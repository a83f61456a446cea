"""The metrics that gateways and autoscalers know by vLLM's names, for those that ask for them.

The endpoint picker of the Gateway API inference extension reads the queue and the use of the KV
cache under these names by default, and so do examples of KEDA and of Kubernetes' own autoscaler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.observability.http_metrics import HttpCollector

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
        told = self._client.statistics
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
        total = self._http.counters.total()
        for name, own in HISTOGRAMS.items():
            histogram = self._http.histograms[own]
            yield histogram.family(total, name, histogram.name)
