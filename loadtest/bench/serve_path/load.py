"""What is asked of a server and of the engine alone, the same of both, and what came of it."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

WORDS = ("river", "stone", "garden", "window", "letter", "summer", "mountain", "paper")
PROMPT_WORDS = 60
# Longer than a step takes: whoever rests for less than this may ask at any moment of one.
LONGEST_REST_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` that each ask ``rounds`` times for about ``tokens`` tokens, one request after the
    other.

    In lockstep all outputs have one length, so all streams end in one step and ask again at one
    moment. Staggered, the lengths are drawn from ``tokens`` / 2 to ``tokens`` * 3 / 2, and a stream
    rests a drawn time before it asks: requests come at any moment of a step, on either side.
    (Without the rest the engine alone would be asked between two steps, and a server always in the
    middle of one.)
    """

    streams: int
    rounds: int
    tokens: int
    staggered: bool = False

    def prompt(self, stream: int, left: int) -> str:
        """That of a stream's request, after which ``left`` are left: like no other from its
        start."""
        begin = stream * 31 + left * 7
        words = (WORDS[(begin + i * (1 + left)) % len(WORDS)] for i in range(PROMPT_WORDS))
        return f"{stream} {left} {' '.join(words)}"

    def output_tokens(self, stream: int, left: int) -> int:
        """How many tokens that request asks for: the same in every run."""
        if not self.staggered:
            return self.tokens
        draw = random.Random(f"{stream} {left}")
        return draw.randint(max(1, self.tokens // 2), max(1, self.tokens * 3 // 2))

    def rest_seconds(self, stream: int, left: int) -> float:
        """How long a stream waits before that request: the same in every run."""
        if not self.staggered:
            return 0.0
        return random.Random(f"rest {stream} {left}").uniform(0.0, LONGEST_REST_SECONDS)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``tokens`` streamed in ``seconds``. In seconds: times to first tokens, one per request; times
    between pieces, one per piece that is not the first of its response; and times per token after
    the first, one per request that has more than one."""

    tokens: int
    events: int
    seconds: float
    first_token_seconds: list[float] = field(default_factory=list)
    between_seconds: list[float] = field(default_factory=list)
    per_token_seconds: list[float] = field(default_factory=list)


class RequestTimes:
    """The times of one stream's requests, gathered over all of them."""

    def __init__(self) -> None:
        self.first_token_seconds: list[float] = []
        self.between_seconds: list[float] = []
        self.per_token_seconds: list[float] = []
        self._asked = self._first = self._last = 0.0

    @property
    def answered(self) -> bool:
        """Whether anything of the answer to the latest request has come."""
        return self._first > 0.0

    def ask(self, now: float) -> None:
        self._asked, self._first, self._last = now, 0.0, 0.0

    def hear(self, now: float) -> None:
        """A piece of the answer has come."""
        if self._first:
            self.between_seconds.append(now - self._last)
        else:
            self.first_token_seconds.append(now - self._asked)
            self._first = now
        self._last = now

    def end(self, tokens: int) -> None:
        """The piece heard last was the end of an answer of ``tokens`` tokens."""
        if tokens > 1:
            self.per_token_seconds.append((self._last - self._first) / (tokens - 1))


def gathered(times: list[RequestTimes], tokens: int, events: int, seconds: float) -> LoadResult:
    """All streams' times as one result."""
    return LoadResult(
        tokens,
        events,
        seconds,
        first_token_seconds=[s for each in times for s in each.first_token_seconds],
        between_seconds=[s for each in times for s in each.between_seconds],
        per_token_seconds=[s for each in times for s in each.per_token_seconds],
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="requests of each stream")
    parser.add_argument("--tokens", type=int, required=True, help="of each response")
    parser.add_argument(
        "--staggered", action="store_true", help="responses of different lengths, and rests between"
    )


def load_of(given: argparse.Namespace) -> Load:
    return Load(given.streams, given.rounds, given.tokens, given.staggered)


def as_arguments(load: Load) -> list[str]:
    """What `load_of` reads."""
    numbers = {"--streams": load.streams, "--rounds": load.rounds, "--tokens": load.tokens}
    options = [text for name, value in numbers.items() for text in (name, str(value))]
    return [*options, "--staggered"] if load.staggered else options
