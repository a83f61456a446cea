"""The figures of a run: latencies, throughput, goodput, and how far the client can be trusted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from lexshard.loadtest.bench.record import Measure, percentile
from lexshard.loadtest.bench.serve.objectives import Objective, are_met
from lexshard.loadtest.bench.serve.timeline import LoadRun, most_in_flight

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
CLIENT_QUEUE = Measure("client queue mean", "ms", higher_is_better=False)
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
        CLIENT_QUEUE: 1e3 * statistics.fmean(each.due - each.planned for each in run.requests),
        LATE_P99: percentile(late, 99),
        LATE_MOST: max(late),
        LOOP_P99: 1e3 * percentile(run.loop_delays or (0.0,), 99),
    }


def faults(run: LoadRun) -> list[tuple[str, int]]:
    """Why requests were not answered, the most frequent reason first."""
    return Counter(each.fault for each in run.requests if each.fault).most_common()
