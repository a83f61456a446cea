"""The engine without HTTP, asked as the client asks: what the way to the wire is measured against.

    python -m lexshard.loadtest.bench.serve_path.engine_alone MODEL --core 0 --streams 8 \\
        --rounds 4 --tokens 64

A process of its own on one core, which prints what the client prints.

Who is told the end of a response and asks again cannot be heard before the step that begins
meanwhile has ended. Without ``--reply-seconds`` the engine alone would be asked between the two
steps, as no client can ask: thirty-two streams then settle in groups that fill a step each, and
wait for half as long as with a millisecond in between.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from heapq import heappop, heappush

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.text.codec import TextCodec
from lexshard.loadtest.bench.serve_path.load import (
    Load,
    LoadResult,
    RequestTimes,
    add_load_arguments,
    gathered,
    load_of,
)

# Less than any way to a client and back takes, and longer than the engine is between two steps.
REPLY_SECONDS = 0.001


class Stream:
    """One request after the other, each of which is asked when the one before has ended."""

    def __init__(self, index: int, load: Load, codec: TextCodec) -> None:
        self.times = RequestTimes()
        self.tokens = 0
        self.index = index
        self._load = load
        self._left = load.rounds
        self._wanted = 0
        self._prompts = {  # the engine alone need not tokenise while it is measured
            left: tuple(codec.encode(load.prompt(index, left)))
            for left in range(1, load.rounds + 1)
        }

    def rest_seconds(self) -> float | None:
        """How long to wait before the next request; None after the last one."""
        return self._load.rest_seconds(self.index, self._left) if self._left else None

    def next_request(self, due: float) -> Request:
        """The request that was wanted at the time ``due``, perhaps in the middle of a step."""
        token_ids = self._prompts[self._left]
        self._wanted = self._load.output_tokens(self.index, self._left)
        self._left -= 1
        self.times.ask(due)
        wanted = SamplingParameters(temperature=0, max_tokens=self._wanted, ignore_eos=True)
        return Request(f"{self.index}-{self._left}", 0, token_ids, wanted)

    def end(self) -> None:
        """The latest request has been answered."""
        self.times.end(self._wanted)
        self.tokens += self._wanted


def follow(model: str, load: Load, reply_seconds: float = REPLY_SECONDS) -> LoadResult:
    """What became of ``load``, whose streams ask no sooner than ``reply_seconds`` after an answer.

    Raises ValueError for a model without a tokenizer or a request that is refused.
    """
    codec = TextCodec.load(model)
    if codec is None:
        raise ValueError(f"{model} has no tokenizer")
    engine = Engine(EngineConfiguration(model, threads=1))
    engine.warm_up()
    open_streams: dict[str, Stream] = {}
    resting: list[tuple[float, int, Stream]] = []  # a heap, by when they ask

    def rest(stream: Stream) -> None:
        seconds = stream.rest_seconds()
        if seconds is not None:
            due = time.perf_counter() + max(seconds, reply_seconds)
            heappush(resting, (due, stream.index, stream))

    def ask(due: float, stream: Stream) -> None:
        request = stream.next_request(due)
        refusal = engine.submit(request)
        if refusal is not None:
            raise ValueError(refusal.error)
        open_streams[request.request_id] = stream

    streams = [Stream(index, load, codec) for index in range(load.streams)]
    started = time.perf_counter()
    for stream in streams:
        rest(stream)
    while open_streams or resting:
        if not open_streams:
            time.sleep(max(0.0, resting[0][0] - time.perf_counter()))
        while resting and resting[0][0] <= time.perf_counter():
            due, _, stream = heappop(resting)
            ask(due, stream)
        for event in engine.step():
            stream = open_streams[event.request_id]
            stream.times.hear(time.perf_counter())
            if event.finish_reason is not None:
                stream.end()
                del open_streams[event.request_id]
                rest(stream)
    made = sum(stream.tokens for stream in streams)
    seconds = time.perf_counter() - started
    return gathered([stream.times for stream in streams], made, made, seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument(
        "--reply-seconds",
        type=float,
        default=REPLY_SECONDS,
        help="between a response and the stream's next request, at least",
    )
    add_load_arguments(parser)
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})
    print(json.dumps(asdict(follow(given.model, load_of(given), given.reply_seconds))))


if __name__ == "__main__":
    main()
