"""What became of every request of a run, moment by moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """One request; all times are seconds after the beginning of its run.

    It was ``planned`` to be sent, and was ``sent``; ``pieces`` of text came; it ``ended`` with the
    last of its choice, or its failure.
    ``fault`` says why it is no whole answer, empty if it is one.
    """

    planned: float
    sent: float
    ended: float
    pieces: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    fault: str = ""

    @property
    def first(self) -> float:
        """When the first text came; the end of an answer without any."""
        return self.pieces[0] if self.pieces else self.ended

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds from the sending."""
        return self.first - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from the sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (E2E - TTFT) / (n - 1); None for one token, and
        where no text tells when the first came."""
        told = self.pieces and self.output_tokens > 1
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if told else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between neighbouring pieces of text."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def late(self) -> float:
        """Seconds by which the client sent it late."""
        return self.sent - self.planned

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RequestTimeline:
        return cls(**{**fields, "pieces": tuple(fields["pieces"])})


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run of a load on one endpoint. ``loop_delays`` are seconds by which the client's own
    clock ticked late: as long as that, whatever came had to wait to be noticed."""

    endpoint: str
    rate: float | str
    run: int
    requests: tuple[RequestTimeline, ...]
    loop_delays: tuple[float, ...]

    @property
    def answered(self) -> list[RequestTimeline]:
        return [each for each in self.requests if not each.fault]

    @property
    def seconds(self) -> float:
        """From the beginning to the last sending or the end of the last answer, which is later: a
        time-out at the end does not count, a server that answers no more does. Without any answer
        to the end of the last failure."""
        ends = [each.ended for each in self.answered or self.requests]
        return max(*ends, *(each.sent for each in self.requests))

    def as_json(self) -> dict[str, Any]:
        """Times are rounded to 10 microseconds."""
        rounded = {
            "requests": [
                {
                    **{key: _rounded(value) for key, value in asdict(each).items()},
                    "pieces": [_rounded(piece) for piece in each.pieces],
                }
                for each in self.requests
            ],
            "loop_delays": [_rounded(each) for each in self.loop_delays],
        }
        return {"endpoint": self.endpoint, "rate": self.rate, "run": self.run, **rounded}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LoadRun:
        requests = tuple(map(RequestTimeline.from_json, fields["requests"]))
        delays = tuple(fields["loop_delays"])
        return cls(fields["endpoint"], fields["rate"], fields["run"], requests, delays)


def counted_over(
    spans: Sequence[tuple[float, float]], moments: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """How many spans contain each moment; a span begins with its start and ends before its end."""
    starts, ends = (np.sort(np.array([span[side] for span in spans])) for side in (0, 1))
    begun = np.searchsorted(starts, moments, side="right")
    return np.asarray(begun - np.searchsorted(ends, moments, side="right"), dtype=np.int64)


def most_in_flight(requests: Sequence[RequestTimeline]) -> int:
    """How many were sent and not yet ended at the fullest moment."""
    spans = [(each.sent, each.ended) for each in requests]
    return int(counted_over(spans, np.array([each.sent for each in requests])).max())


@dataclass(frozen=True, slots=True)
class OverTime:
    """What a run did from moment to moment: at each of ``seconds``, how many requests were in
    flight and how many of them had no token yet (the queue as a client sees it, and prefill); and
    the output tokens/s in the interval that ends there  # all [n]"""

    seconds: npt.NDArray[np.float64]
    in_flight: npt.NDArray[np.int64]
    waiting: npt.NDArray[np.int64]
    tokens_per_second: npt.NDArray[np.float64]


def over_time(run: LoadRun, intervals: int) -> OverTime:
    """Until the last request ended, answered or not. A piece of text stands for its share of the
    answer's tokens."""
    edges = np.linspace(0.0, max(each.ended for each in run.requests), intervals + 1)
    moments = edges[1:]
    pieces = [piece for each in run.requests for piece in each.pieces]
    weights = [each.output_tokens / len(each.pieces) for each in run.requests for _ in each.pieces]
    tokens, _ = np.histogram(pieces, edges, weights=weights)
    middle = moments - edges[1] / 2
    return OverTime(
        moments,
        counted_over([(each.sent, each.ended) for each in run.requests], middle),
        counted_over([(each.sent, each.first) for each in run.requests], middle),
        tokens / edges[1],
    )


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) and math.isfinite(value) else value
