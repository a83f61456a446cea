"""``/metrics``: the engine's counters and those of the HTTP edge, as Prometheus text.

Whichever API process is asked, it answers for the server. prometheus_client's own way to that is
chosen for a whole process, by its environment before the first import, Ray's included; so what is
counted here stands in cells of ours, and prometheus_client writes it down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from actors.messages import EngineStatistics
from actors.statistic import Statistic, statistics_of
from serve_app.admission import Admission
from serve_app.api_processes.counters import Cells, SharedCounters
from serve_app.api_processes.seats import Seats
from serve_app.engine_client import EngineClient
from serve_app.request_record import RequestRecord

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
_METHODS = ("GET", "POST", OTHER)
_FIRST_STATUS, _STATUSES = 100, 500
# The first cells; those of the histograms and of the requests follow.
_RESTARTS, _PROMPT_TOKENS, _COMPLETION_TOKENS, _HISTOGRAMS = range(4)


class EngineCollector(Collector):
    """Reads the engine's latest statistics whenever Prometheus asks."""

    def __init__(
        self, client: EngineClient, admission: Admission, counters: SharedCounters
    ) -> None:
        self._client = client
        self._admission = admission
        self._counters = counters
        # What others have seen: this process's client begins at none.
        self._earlier_restarts = counters.largest(_RESTARTS)

    def collect(self) -> Iterator[Metric]:
        self._admission.forget_the_dead()
        own = self._counters.own
        own[_RESTARTS] = max(own[_RESTARTS], self._earlier_restarts + self._client.restarts)
        statistics = self._client.statistics
        for name, declared in statistics_of(EngineStatistics).items():
            yield _engine_metric(name, declared, getattr(statistics, name))
        yield GaugeMetricFamily(
            "lexshard_ready", "1 while the engine answers", value=float(self._client.ready)
        )
        yield CounterMetricFamily(
            "lexshard_engine_restarts",
            "Engines lost and replaced",
            value=self._counters.largest(_RESTARTS),
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


class _Histogram:
    """Cells from ``first`` on: one for each of ``bounds``, one for what is beyond, the sum."""

    def __init__(self, name: str, description: str, bounds: Sequence[float], first: int) -> None:
        self._name = name
        self._description = description
        self._bounds = bounds
        self._first = first
        self._sum = first + len(bounds) + 1
        self.end = self._sum + 1

    def observe(self, cells: Cells, value: float) -> None:
        cells[self._first + bisect_left(self._bounds, value)] += 1
        cells[self._sum] += value

    def family(self, cells: Cells) -> HistogramMetricFamily:
        counts = accumulate(cells[self._first : self._sum].tolist())
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        return HistogramMetricFamily(
            self._name,
            self._description,
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=float(cells[self._sum]),
        )


class HttpCollector(Collector):
    """Counts finished HTTP requests: by method and path, ``paths`` and 'other', and by status."""

    def __init__(self, paths: Sequence[str], seats: Seats | None) -> None:
        self._paths = (*paths, OTHER)
        self._path_index = {path: index for index, path in enumerate(self._paths)}
        self._duration = duration = _Histogram(
            "lexshard_request_seconds", "From request to last token", SECONDS, _HISTOGRAMS
        )
        self._first_token = first_token = _Histogram(
            "lexshard_time_to_first_token_seconds",
            "From request to first token",
            SECONDS,
            duration.end,
        )
        self._per_token = _Histogram(
            "lexshard_time_per_output_token_seconds",
            "Mean time per token after the first",
            SECONDS_PER_TOKEN,
            first_token.end,
        )
        self._requests = self._per_token.end
        cells = self._requests + len(_METHODS) * len(self._paths) * _STATUSES
        self.counters = SharedCounters(cells, seats)

    def observe(self, record: RequestRecord) -> None:
        own = self.counters.own
        method = _METHODS.index(record.method if record.method in _METHODS else OTHER)
        path = self._path_index.get(record.path, len(self._paths) - 1)
        row = method * len(self._paths) + path
        own[self._requests + row * _STATUSES + record.status - _FIRST_STATUS] += 1
        first = record.seconds_to_first_token
        if first is None:
            return
        seconds = record.seconds
        own[_PROMPT_TOKENS] += record.prompt_tokens
        own[_COMPLETION_TOKENS] += record.completion_tokens
        self._duration.observe(own, seconds)
        self._first_token.observe(own, first)
        if record.completion_tokens > 1:
            self._per_token.observe(own, (seconds - first) / (record.completion_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        total = self.counters.total()
        requests = CounterMetricFamily(
            "lexshard_http_requests",
            "HTTP requests answered; status 499 is a client that left",
            labels=("method", "path", "status"),
        )
        for index in total[self._requests :].nonzero()[0].tolist():
            row, status = divmod(index, _STATUSES)
            method, path = divmod(row, len(self._paths))
            labels = (_METHODS[method], self._paths[path], str(status + _FIRST_STATUS))
            requests.add_metric(labels, float(total[self._requests + index]))
        yield requests
        tokens = CounterMetricFamily(
            "lexshard_http_tokens", "Tokens of answered requests", labels=("kind",)
        )
        tokens.add_metric(("prompt",), float(total[_PROMPT_TOKENS]))
        tokens.add_metric(("completion",), float(total[_COMPLETION_TOKENS]))
        yield tokens
        for histogram in (self._duration, self._first_token, self._per_token):
            yield histogram.family(total)


class ServerMetrics:
    """All that ``/metrics`` tells. ``seats`` None: of this process alone."""

    def __init__(
        self,
        client: EngineClient,
        admission: Admission,
        paths: Sequence[str],
        seats: Seats | None = None,
    ) -> None:
        self._http = HttpCollector(paths, seats)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(client, admission, self._http.counters))
        self._registry.register(self._http)

    def observe(self, record: RequestRecord) -> None:
        """Counts a request that has been answered."""
        self._http.observe(record)

    def text(self) -> bytes:
        return generate_latest(self._registry)
