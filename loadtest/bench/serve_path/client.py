"""A client that costs little: streams of completions over kept connections, counted as they come.

    python -m loadtest.bench.serve_path.client URL MODEL --streams 32 --rounds 4 --tokens 256

A process of its own, which prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import cast
from urllib.parse import urlsplit

EVENT, DONE = b"data: {", b"data: [DONE]"
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
WORDS = ("river", "stone", "garden", "window", "letter", "summer", "mountain", "paper")
PROMPT_WORDS = 60


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``tokens`` streamed in ``seconds``. Times to first tokens and between pieces in seconds, one
    per request and one per piece that is not the first of its response."""

    tokens: int
    events: int
    seconds: float
    first_token_seconds: list[float] = field(default_factory=list)
    between_seconds: list[float] = field(default_factory=list)


def prompt(index: int, left: int) -> str:
    """That of a stream's request, after which ``left`` are left: like no other from its start."""
    begin = index * 31 + left * 7
    words = (WORDS[(begin + i * (1 + left)) % len(WORDS)] for i in range(PROMPT_WORDS))
    return f"{index} {left} {' '.join(words)}"


class Connection(asyncio.Protocol):
    """One connection: ``rounds`` requests of ``tokens`` tokens, one after the other."""

    def __init__(self, index: int, host: str, model: str, rounds: int, tokens: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = self.events = 0
        self.first_token_seconds: list[float] = []
        self.between_seconds: list[float] = []
        self._index = index
        self._host = host
        self._model = model
        self._left = rounds
        self._wanted = tokens
        self._tail = b""
        self._asked = self._heard = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._ask()

    def _ask(self) -> None:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt(self._index, self._left),
                "max_tokens": self._wanted,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._tail = b""
        self._heard = 0.0
        self._asked = time.perf_counter()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        searched = self._tail[-len(EVENT) + 1 :] + data  # a mark may be cut in two
        found = searched.count(EVENT)
        self.events += found
        if self._heard:
            self.between_seconds.append(now - self._heard)
            self._heard = now
        elif found:
            self.first_token_seconds.append(now - self._asked)
            self._heard = now
        self._tail = (self._tail + data)[-2048:]
        if DONE in self._tail and self._tail.endswith(b"0\r\n\r\n"):
            self._finish()
        elif not self._heard and b"\r\n\r\n" in self._tail and b"HTTP/1.1 200" not in self._tail:
            self._fail(self._tail.decode(errors="replace"))

    def _finish(self) -> None:
        self.events -= 1  # the one that tells of usage
        told = USAGE.search(self._tail)
        if told is None or int(told[1]) != self._wanted:
            self._fail(f"a stream told of {told and told[1]!r} tokens, not {self._wanted}")
            return
        self.tokens += self._wanted
        self._left -= 1
        if self._left:
            self._ask()
            return
        self._transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, reason: str) -> None:
        self._transport.close()
        if not self.done.done():
            self.done.set_exception(RuntimeError(reason))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server closed a connection: {error}"))


async def load(url: str, model: str, streams: int, rounds: int, tokens: int) -> LoadResult:
    """Raises RuntimeError for any answer that is not the whole stream that was asked for."""
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    protocols = []
    for index in range(streams):
        _, protocol = await loop.create_connection(
            lambda index=index: Connection(index, host, model, rounds, tokens),  # type: ignore[misc]
            host,
            port,
        )
        protocols.append(protocol)
    await asyncio.gather(*(each.done for each in protocols))
    return LoadResult(
        tokens=sum(each.tokens for each in protocols),
        events=sum(each.events for each in protocols),
        seconds=time.perf_counter() - started,
        first_token_seconds=[s for each in protocols for s in each.first_token_seconds],
        between_seconds=[s for each in protocols for s in each.between_seconds],
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    given = parser.parse_args()
    import uvloop

    try:
        result = uvloop.run(load(given.url, given.model, given.streams, given.rounds, given.tokens))
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
