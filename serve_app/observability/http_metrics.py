"""What the HTTP edge counts when a request has been answered; nothing is counted per token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lexshard.serve_app.api_processes.seats import Cells, Seats, SharedCounters
from lexshard.serve_app.request_record import RequestRecord


def buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' cumulative buckets of ``counts``: one for each bound, one for what is beyond."""
    names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]
    return list(zip(names, accumulate(counts), strict=True))


class CellHistogram:
    """Cells from ``first`` on: one for each of ``bounds``, one for what is beyond, the sum."""

    def __init__(self, name: str, description: str, bounds: Sequence[float], first: int) -> None:
        self.name = name
        self._description = description
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._first = first
        self._sum = first + len(bounds) + 1
        self.end = self._sum + 1

    def observe(self, cells: Cells, value: float) -> None:
        cells[self._first + bisect_left(self._bounds, value)] += 1
        cells[self._sum] += value

    def observe_all(self, cells: Cells, values: npt.NDArray[np.float64]) -> None:
        """Many ``values`` [n] at once."""
        places = np.searchsorted(self._edges, values)
        counts = np.bincount(places, minlength=len(self._bounds) + 1)
        cells[self._first : self._sum] += counts
        cells[self._sum] += values.sum()

    def family(
        self, cells: Cells, name: str | None = None, description: str | None = None
    ) -> HistogramMetricFamily:
        """What has been observed, under its own ``name`` or another."""
        return HistogramMetricFamily(
            name or self.name,
            description or self._description,
            buckets=buckets(self._bounds, cells[self._first : self._sum].tolist()),
            sum_value=float(cells[self._sum]),
        )


SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKENS = tuple(float(2**power) for power in range(18))  # 1 to 131,072
OTHER = "other"
_METHODS = ("GET", "HEAD", "POST", OTHER)
_FIRST_STATUS, _STATUSES = 100, 500
# The first cells; those of the histograms and of the requests follow.
RESTARTS, PROMPT_TOKENS, COMPLETION_TOKENS, _HISTOGRAMS = range(4)
# Name, description and bounds of each histogram.
_OBSERVED = (
    ("request_seconds", "From request to last token", SECONDS),
    ("time_to_first_token_seconds", "From request to first token", SECONDS),
    ("time_per_output_token_seconds", "Mean time per token after the first", SECONDS_PER_TOKEN),
    (
        "inter_token_latency_seconds",
        "Between two messages with tokens of one request: of one engine step each, or of several",
        SECONDS_PER_TOKEN,
    ),
    ("queue_seconds", "From a request's arrival in the engine to its first step", SECONDS),
    ("prefill_seconds", "From a request's first step to its first token", SECONDS),
    ("request_prompt_tokens", "Prompt tokens of a request", TOKENS),
    ("request_output_tokens", "Output tokens of a request, of all its choices", TOKENS),
)


class HttpCollector(Collector):
    """Counts finished HTTP requests: by method and path, ``paths`` and 'other', and by status."""

    def __init__(self, paths: Sequence[str], seats: Seats | None) -> None:
        self._paths = (*paths, OTHER)
        self._path_index = {path: index for index, path in enumerate(self._paths)}
        self.histograms: dict[str, CellHistogram] = {}
        end = _HISTOGRAMS
        for name, description, bounds in _OBSERVED:
            made = CellHistogram(f"lexshard_{name}", description, bounds, end)
            self.histograms[name] = made
            end = made.end
        self._requests = end
        cells = self._requests + len(_METHODS) * len(self._paths) * _STATUSES
        self.counters = SharedCounters(cells, seats)

    def observe(self, record: RequestRecord) -> None:
        own = self.counters.own
        method = _METHODS.index(record.method if record.method in _METHODS else OTHER)
        path = self._path_index.get(record.path, len(self._paths) - 1)
        row = method * len(self._paths) + path
        own[self._requests + row * _STATUSES + record.status - _FIRST_STATUS] += 1
        if record.first_token_time is not None:
            self._observe_tokens(own, record, record.first_token_time - record.start_time)

    def _observe_tokens(self, own: Cells, record: RequestRecord, first: float) -> None:
        """What a request that has had a token, after ``first`` seconds, tells."""
        seconds, told = record.seconds, self.histograms
        own[PROMPT_TOKENS] += record.prompt_tokens
        own[COMPLETION_TOKENS] += record.completion_tokens
        told["request_seconds"].observe(own, seconds)
        told["time_to_first_token_seconds"].observe(own, first)
        told["request_prompt_tokens"].observe(own, record.prompt_tokens)
        told["request_output_tokens"].observe(own, record.completion_tokens)
        further = record.completion_tokens / record.choices - 1  # of a choice, in the mean
        if further > 0:
            told["time_per_output_token_seconds"].observe(own, (seconds - first) / further)
        if len(record.piece_times) > 1:
            told["inter_token_latency_seconds"].observe_all(own, np.diff(record.piece_times))
        if record.began is not None:
            told["queue_seconds"].observe(own, record.began.queued)
            told["prefill_seconds"].observe(own, record.began.prefill)

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
        processes = CounterMetricFamily(
            "lexshard_api_process_requests",
            "HTTP requests answered, by the API process that did",
            labels=("process",),
        )
        for process, count in enumerate(self.counters.by_process(self._requests)):
            if count:
                processes.add_metric((str(process),), count)
        yield processes
        tokens = CounterMetricFamily(
            "lexshard_http_tokens", "Tokens of answered requests", labels=("kind",)
        )
        tokens.add_metric(("prompt",), float(total[PROMPT_TOKENS]))
        tokens.add_metric(("completion",), float(total[COMPLETION_TOKENS]))
        yield tokens
        for histogram in self.histograms.values():
            yield histogram.family(total)
