"""What is asked and when: decided before the load begins, the same for every endpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

from lexshard.loadtest.arrivals import arrival_seconds
from lexshard.loadtest.prompts import PromptWriter
from lexshard.loadtest.traces import BLOCK_TOKENS, Trace, TracedRequest


class PlannedRequest(NamedTuple):
    """``seconds`` after the beginning of the load, ``body`` is sent."""

    seconds: float
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and answers are: a trace's, scaled and cut, or all alike."""

    trace: Trace | None = None
    scale: float = 1.0
    prompt_tokens: int = 64
    output_tokens: int = 64
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"--length-scale {self.scale}: give a positive number")

    @property
    def block_tokens(self) -> float:
        return max(1.0, BLOCK_TOKENS * self.scale)

    def of_requests(self, count: int) -> list[TracedRequest]:
        """``count`` requests with their final lengths; a shorter trace begins again, with prompts
        of its own. Times are the trace's."""
        if self.trace is None:
            wanted = [TracedRequest(0.0, self.prompt_tokens, self.output_tokens)] * count
        else:
            wanted = [
                each._replace(
                    prompt_tokens=max(1, round(each.prompt_tokens * self.scale)),
                    output_tokens=max(1, round(each.output_tokens * self.scale)),
                )
                for each in islice(cycle(self.trace.requests), count)
            ]
        return [
            each._replace(
                prompt_tokens=min(each.prompt_tokens, self.max_prompt_tokens or each.prompt_tokens),
                output_tokens=min(each.output_tokens, self.max_output_tokens or each.output_tokens),
            )
            for each in wanted
        ]

    def name(self) -> str:
        """As the report calls them."""
        if self.trace is None:
            name = f"{self.prompt_tokens} in, {self.output_tokens} out"
        else:
            name = self.trace.name + (f" x {self.scale:g}" if self.scale != 1 else "")
        cuts = {"in": self.max_prompt_tokens, "out": self.max_output_tokens}
        return name + "".join(f", at most {most} {side}" for side, most in cuts.items() if most)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come: at a rate, or as in the trace, ``time_scale`` times as slowly."""

    kind: str  # one of arrivals.ARRIVALS, or "trace"
    rate: float | None = None  # requests/s; None with a trace's own times
    burstiness: float = 1.0
    time_scale: float = 1.0

    def seconds(self, requests: Sequence[TracedRequest], seed: int) -> list[float]:
        if self.rate is None:
            return [each.seconds * self.time_scale for each in requests]
        drawn = arrival_seconds(self.kind, self.rate, len(requests), seed, self.burstiness)
        return [float(each) for each in drawn]

    def count(self, trace: Trace | None, requests: int | None, seconds: float | None) -> int:
        """How many requests there are.

        Raises:
            ValueError: times of a trace are wanted without a trace that has them, or none come.
        """
        if self.rate is not None:
            count = requests if seconds is None else round(seconds * self.rate)
        else:
            if trace is None or not trace.timed:
                raise ValueError("--arrivals trace: give --trace with a trace that has times")
            end = math.inf if seconds is None else seconds
            coming = sum(each.seconds * self.time_scale <= end for each in trace.requests)
            count = coming if requests is None else min(coming, requests)
        if not count:
            raise ValueError("no request comes in that time: give more --seconds or --requests")
        return count


@dataclass(frozen=True, slots=True)
class Wording:
    """How a request is put: the route and everything in its body but prompt and length."""

    chat: bool
    model: str
    fields: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: str, output_tokens: int) -> dict[str, Any]:
        asked = (
            {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        )
        return {
            "model": self.model,
            **asked,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


def plan_requests(
    wording: Wording,
    lengths: Lengths,
    arrivals: Arrivals,
    count: int,
    seed: int,
    tokens_per_word: float,
) -> list[PlannedRequest]:
    """The load of one run; that of another ``seed`` has other prompts and times."""
    requests = lengths.of_requests(count)
    writer = PromptWriter(seed, tokens_per_word, lengths.block_tokens)
    return [
        PlannedRequest(
            seconds,
            wording.body(writer.write(index, each.prompt_tokens, each.blocks), each.output_tokens),
        )
        for index, (each, seconds) in enumerate(
            zip(requests, arrivals.seconds(requests, seed), strict=True)
        )
    ]
