"""The engine's latest statistics, and what an API process knows of its engine, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lexshard.actors.statistic import Statistic, statistics_of
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.counters import SharedCounters
from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.observability.cell_histogram import buckets
from lexshard.serve_app.observability.http_metrics import RESTARTS


class EngineCollector(Collector):
    """Reads the engine's latest statistics whenever Prometheus asks."""

    def __init__(
        self, client: EngineClient, admission: Admission, counters: SharedCounters
    ) -> None:
        self._client = client
        self._admission = admission
        self._counters = counters
        # What others have seen: this process's client begins at none.
        self._earlier_restarts = counters.largest(RESTARTS)

    def collect(self) -> Iterator[Metric]:
        self._admission.forget_the_dead()
        own = self._counters.own
        own[RESTARTS] = max(own[RESTARTS], self._earlier_restarts + self._client.restarts)
        statistics = self._client.statistics
        for name, declared in statistics_of(type(statistics)).items():
            yield _engine_metric(name, declared, getattr(statistics, name))
        yield GaugeMetricFamily(
            "lexshard_ready", "1 while the engine answers", value=float(self._client.ready)
        )
        yield CounterMetricFamily(
            "lexshard_engine_restarts",
            "Engines lost and replaced",
            value=self._counters.largest(RESTARTS),
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
