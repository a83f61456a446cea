"""The figures of a run: latencies, throughput, how far the client can be trusted, and goodput by
service level objectives."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.loadtest.bench.load.timeline import LoadRun, RequestTimeline, most_in_flight
from lexshard.loadtest.bench.record import Measure, percentile

PERCENTILES = (90, 95, 99)
LATENCIES = ("TTFT", "TPOT", "ITL", "E2E")
REQUEST_RATE = Measure("requests/s", "requests/s", higher_is_better=True)
TOKEN_RATE = Measure("output tokens/s", "tokens/s", higher_is_better=True)
ALL_TOKEN_RATE = Measure("all tokens/s", "tokens/s", higher_is_better=True)
GOODPUT = Measure("goodput", "requests/s", higher_is_better=True)
GOOD_SHARE = Measure("good share", "share", higher_is_better=True)
ANSWERED = Measure("answered", "requests", higher_is_better=True)
ERRORS = Measure("errors", "requests", higher_is_better=False)
IN_FLIGHT = Measure("most in flight", "requests", higher_is_better=False)
LATE_P99 = Measure("client late p99", "ms", higher_is_better=False)
LATE_MOST = Measure("client late max", "ms", higher_is_better=False)
LOOP_P99 = Measure("client loop delay p99", "ms", higher_is_better=False)
# Above 0 for every run that answered anything, and a quality of the server: these have ratios.
COMPARED = (REQUEST_RATE.name, TOKEN_RATE.name, ALL_TOKEN_RATE.name)


def latency(name: str, statistic: str) -> Measure:
    """For example TTFT p99, in milliseconds."""
    return Measure(f"{name} {statistic}", "ms", higher_is_better=False)


def milliseconds(run: LoadRun) -> dict[str, list[float]]:
    """The samples of each of ``LATENCIES``: TTFT, TPOT and E2E one per answered request, ITL one
    per pair of neighbouring pieces of text."""
    answered = run.answered
    samples = {
        "TTFT": [each.ttft for each in answered],
        "TPOT": [each.tpot for each in answered if each.tpot is not None],
        "ITL": [gap for each in answered for gap in each.gaps],
        "E2E": [each.e2e for each in answered],
    }
    return {name: [1e3 * value for value in values] for name, values in samples.items()}


def figures(run: LoadRun, objectives: Sequence[Objective]) -> dict[Measure, float]:
    """Everything measured in a run. What no request of it has (a latency, where none was answered)
    is left out; goodput is there where there are objectives."""
    answered, seconds = run.answered, run.seconds
    output = sum(each.output_tokens for each in answered)
    found = {
        ANSWERED: float(len(answered)),
        ERRORS: float(len(run.requests) - len(answered)),
        REQUEST_RATE: len(answered) / seconds,
        TOKEN_RATE: output / seconds,
        ALL_TOKEN_RATE: (output + sum(each.prompt_tokens for each in answered)) / seconds,
    }
    if objectives:
        good = sum(are_met(objectives, each) for each in run.requests)
        found |= {GOODPUT: good / seconds, GOOD_SHARE: good / len(run.requests)}
    for name, values in milliseconds(run).items():
        if not values:
            continue
        found[latency(name, "mean")] = statistics.fmean(values)
        found[latency(name, "median")] = percentile(values, 50)
        for percent in PERCENTILES:
            found[latency(name, f"p{percent}")] = percentile(values, percent)
    late = [1e3 * each.late for each in run.requests]
    return found | {
        IN_FLIGHT: float(most_in_flight(run.requests)),
        LATE_P99: percentile(late, 99),
        LATE_MOST: max(late),
        LOOP_P99: 1e3 * percentile(run.loop_delays or (0.0,), 99),
    }


def faults(run: LoadRun) -> list[tuple[str, int]]:
    """Why requests were not answered, the most frequent reason first."""
    return Counter(each.fault for each in run.requests if each.fault).most_common()


# As vLLM and AIPerf call them: AIPerf's inter-token latency is (E2E - TTFT) / (n - 1).
_OTHER_NAMES = {
    "e2el": "e2e",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "request_latency": "e2e",
}
_EXAMPLES = "ttft:200, tpot:50, e2e:3000, itl_p99:50, itl_mean:20 or itl_max:500"


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good if its ``measure`` is at most ``limit`` milliseconds."""

    measure: str
    limit: float

    def is_met(self, request: RequestTimeline) -> bool:
        """An answer of one token has no gaps and no time per further token: it meets those. Nothing
        says when tokens of an answer without text came: it does not."""
        seconds = _seconds(self.measure, request)
        if seconds is None:
            return bool(request.pieces) or request.output_tokens < 2
        return 1e3 * seconds <= self.limit

    def __str__(self) -> str:
        return f"{self.measure}:{self.limit:g}"


def are_met(objectives: Sequence[Objective], request: RequestTimeline) -> bool:
    """Whether a request was answered, and meets every objective."""
    return not request.fault and all(each.is_met(request) for each in objectives)


def objective(text: str) -> Objective:
    """``MEASURE:MILLISECONDS`` as a type of argument."""
    name, _, number = text.partition(":")
    name = _OTHER_NAMES.get(name, name)
    try:
        limit = float(number)
        _percent(name)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give {_EXAMPLES}") from None
    if not 0 < limit < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive number of milliseconds")
    return Objective(name, limit)


def _seconds(measure: str, request: RequestTimeline) -> float | None:
    if measure in ("ttft", "tpot", "e2e"):
        seconds: float | None = getattr(request, measure)
        return seconds
    gaps = request.gaps
    if not gaps:
        return None
    percent = _percent(measure)
    return sum(gaps) / len(gaps) if percent is None else percentile(gaps, percent)


def _percent(measure: str) -> float | None:
    """Which percentile of its gaps a request is judged by; None where it is by none.

    Raises ValueError for a measure that there is not.
    """
    if measure in ("ttft", "tpot", "e2e", "itl_mean"):
        return None
    if measure == "itl_max":
        return 100.0
    percent = float(measure.removeprefix("itl_p")) if measure.startswith("itl_p") else -1.0
    if not 0 <= percent <= 100:
        raise ValueError(measure)
    return percent
