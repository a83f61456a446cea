"""A client that costs little: streams of completions over kept connections, counted as they come.

    python -m lexshard.loadtest.bench.serve_path.client URL MODEL --streams 32 --rounds 4

A process of its own, which prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import asdict
from typing import cast
from urllib.parse import urlsplit

from lexshard.loadtest.bench.serve_path.load import (
    Load,
    LoadResult,
    RequestTimes,
    add_load_arguments,
    gathered,
    load_of,
)

EVENT, DONE = b"data: {", b"data: [DONE]"
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class Connection(asyncio.Protocol):
    """One connection: the requests of one stream of a load, one after the other."""

    def __init__(self, index: int, host: str, model: str, load: Load) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = self.events = 0
        self.times = RequestTimes()
        self._index = index
        self._host = host
        self._model = model
        self._load = load
        self._left = load.rounds
        self._wanted = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._rest()

    def _rest(self) -> None:
        seconds = self._load.rest_seconds(self._index, self._left)
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._ask)
        else:
            self._ask()

    def _ask(self) -> None:
        self._wanted = self._load.output_tokens(self._index, self._left)
        body = json.dumps(
            {
                "model": self._model,
                "prompt": self._load.prompt(self._index, self._left),
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
        self.times.ask(time.perf_counter())
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        searched = self._tail[-len(EVENT) + 1 :] + data  # a mark may be cut in two
        found = searched.count(EVENT)
        self.events += found
        if found or self.times.answered:
            self.times.hear(now)
        self._tail = (self._tail + data)[-2048:]
        if DONE in self._tail and self._tail.endswith(b"0\r\n\r\n"):
            self._finish()
        elif (
            not self.times.answered
            and b"\r\n\r\n" in self._tail
            and b"HTTP/1.1 200" not in self._tail
        ):
            self._fail(self._tail.decode(errors="replace"))

    def _finish(self) -> None:
        self.events -= 1  # the one that tells of usage
        told = USAGE.search(self._tail)
        if told is None or int(told[1]) != self._wanted:
            self._fail(f"a stream told of {told and told[1]!r} tokens, not {self._wanted}")
            return
        self.times.end(self._wanted)
        self.tokens += self._wanted
        self._left -= 1
        if self._left:
            self._rest()
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


async def follow(url: str, model: str, load: Load) -> LoadResult:
    """Raises RuntimeError for any answer that is not the whole stream that was asked for."""
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    protocols = []
    for index in range(load.streams):
        _, protocol = await loop.create_connection(
            lambda index=index: Connection(index, host, model, load),  # type: ignore[misc]
            host,
            port,
        )
        protocols.append(protocol)
    await asyncio.gather(*(each.done for each in protocols))
    return gathered(
        [each.times for each in protocols],
        tokens=sum(each.tokens for each in protocols),
        events=sum(each.events for each in protocols),
        seconds=time.perf_counter() - started,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    add_load_arguments(parser)
    given = parser.parse_args()
    import uvloop

    try:
        result = uvloop.run(follow(given.url, given.model, load_of(given)))
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
