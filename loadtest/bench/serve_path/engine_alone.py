"""The engine without HTTP, asked as the client asks: what the way to the wire is measured against.

    python -m loadtest.bench.serve_path.engine_alone MODEL --core 0 --streams 8 --rounds 4 \\
        --tokens 64

A process of its own on one core, which prints what the client prints.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict

from actors.configuration import EngineConfiguration
from actors.engine.engine import Engine
from actors.messages import Request, SamplingParameters
from actors.text.codec import TextCodec
from loadtest.bench.serve_path.client import LoadResult, prompt


class Stream:
    """One request after the other, each of which is asked when the one before has ended."""

    def __init__(self, index: int, rounds: int, tokens: int, codec: TextCodec) -> None:
        self._index = index
        self._left = rounds
        self._tokens = tokens
        self._codec = codec
        self.asked = self.heard = 0.0

    def next_request(self) -> Request | None:
        if not self._left:
            return None
        token_ids = tuple(self._codec.encode(prompt(self._index, self._left)))
        self._left -= 1
        self.asked, self.heard = time.perf_counter(), 0.0
        wanted = SamplingParameters(temperature=0, max_tokens=self._tokens, ignore_eos=True)
        return Request(f"{self._index}-{self._left}", 0, token_ids, wanted)


def load(model: str, streams: int, rounds: int, tokens: int) -> LoadResult:
    """Raises ValueError for a model without a tokenizer or a request that is refused."""
    codec = TextCodec.load(model)
    if codec is None:
        raise ValueError(f"{model} has no tokenizer")
    engine = Engine(EngineConfiguration(model, threads=1))
    engine.warm_up()
    first_token_seconds: list[float] = []
    between_seconds: list[float] = []
    started = time.perf_counter()
    open_streams: dict[str, Stream] = {}

    def ask(stream: Stream) -> None:
        request = stream.next_request()
        if request is None:
            return
        refusal = engine.submit(request)
        if refusal is not None:
            raise ValueError(refusal.error)
        open_streams[request.request_id] = stream

    for index in range(streams):
        ask(Stream(index, rounds, tokens, codec))
    while open_streams:
        for event in engine.step():
            now, stream = time.perf_counter(), open_streams[event.request_id]
            if stream.heard:
                between_seconds.append(now - stream.heard)
            else:
                first_token_seconds.append(now - stream.asked)
            stream.heard = now
            if event.finish_reason is not None:
                del open_streams[event.request_id]
                ask(stream)
    made = streams * rounds * tokens
    seconds = time.perf_counter() - started
    return LoadResult(made, made, seconds, first_token_seconds, between_seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})
    result = load(given.model, given.streams, given.rounds, given.tokens)
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
