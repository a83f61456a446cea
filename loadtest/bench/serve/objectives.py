"""Service level objectives: which answers were good enough to count as goodput."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.loadtest.bench.record import percentile
from lexshard.loadtest.bench.serve.timeline import RequestTimeline

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
        """An answer of one token has no gaps and no time per further token: it meets those."""
        seconds = _seconds(self.measure, request)
        return seconds is None or 1e3 * seconds <= self.limit

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
