"""The way from a device to its server, and what is counted on it."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.protocol import State

from lexshard.actors.edge.frames import VERSION
from lexshard.actors.edge.pace import DraftPace
from lexshard.actors.messages import EngineStatistics
from lexshard.actors.statistic import counter
from lexshard.serve_app.commands.status import own_words, reason
from lexshard.serve_app.edge import wire

MOST_IDLE = 4  # connections that are kept for the next text
OPEN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeStatistics(EngineStatistics):
    """Those of an engine that a device has, and those of its link."""

    edge_uplink_bits: int = field(default=0, metadata=counter("Bits of messages to the server"))
    edge_downlink_bits: int = field(default=0, metadata=counter("Bits of messages from the server"))
    edge_guess_bits: int = field(default=0, metadata=counter("Bits of guesses, sent or not"))
    edge_encode_seconds: float = field(default=0.0, metadata=counter("Seconds to encode guesses"))
    edge_answers: int = field(default=0, metadata=counter("Messages that told of tokens"))
    edge_rejections: int = field(default=0, metadata=counter("Guesses tested that did not stand"))
    edge_lost_links: int = field(default=0, metadata=counter("Connections that were lost"))
    edge_dropped_mass: float = field(default=0.0, metadata=counter("Mass that csqs dropped"))
    edge_dropped_bound: float = field(default=0.0, metadata=counter("Mass that csqs could drop"))
    edge_bounds_broken: int = field(default=0, metadata=counter("Times that csqs dropped more"))


class CloudError(Exception):
    """The server is away (``final`` False), or never will do."""

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


class CloudLink:
    """To the server at ``url``, for a device with tokens of that ``vocabulary``: what it costs,
    what is counted on it, and connections whose text has ended, which the next one takes."""

    def __init__(self, url: str, key: str | None, vocabulary: str, pace: DraftPace) -> None:
        self.url = url
        self.vocabulary = vocabulary
        self.pace = pace
        self._address = url.rstrip("/") + wire.PATH
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._connect = partial(
            connect,
            "ws" + self._address.removeprefix("http"),
            additional_headers=self._headers,
            compression=None,
            max_size=None,
            open_timeout=OPEN_SECONDS,
            user_agent_header=None,
        )
        self._idle: list[ClientConnection] = []
        self._counted: Any = Counter()

    def count(self, **amounts: Any) -> None:
        """Adds to what `EdgeStatistics` has by these names."""
        self._counted.update(amounts)

    @property
    def statistics(self) -> EdgeStatistics:
        return EdgeStatistics(**self._counted)

    def ask(self) -> wire.Cloud:
        """What the server says of itself. Raises `CloudError`."""
        url, request = self.url, urllib.request.Request(self._address, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=OPEN_SECONDS) as reply:
                told = json.load(reply)
            if told["version"] != VERSION:
                raise CloudError(f"{url} speaks version {told['version']}, not {VERSION}")
            cloud = msgspec.convert(told, wire.Cloud)
        except urllib.error.HTTPError as error:
            words = f"{url} answers {error.code}: {own_words(error) or error.reason}"
            raise CloudError(words, final=error.code in (401, 403, 404)) from None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            words = f"{url} does not answer as lexshard does: {reason(error)}"
            raise CloudError(words, final=False) from None
        if cloud.vocabulary != self.vocabulary:
            raise CloudError(
                f"the draft model's tokenizer is not that of {', '.join(cloud.models)}, which "
                f"{url} serves: use a draft model that was made for it"
            )
        return cloud

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[ClientConnection]:
        """For one text, which ends with it. Raises what `websockets.connect` raises."""
        asked = time.monotonic()
        self._idle = [each for each in self._idle if each.state is State.OPEN]
        connection = self._idle.pop() if self._idle else await self._connect()
        self.pace.connected(time.monotonic() - asked)
        try:
            yield connection
        except BaseException:
            await connection.close()
            raise
        self._idle.append(connection)
        while len(self._idle) > MOST_IDLE:
            await self._idle.pop().close()

    async def close(self) -> None:
        for connection in self._idle:
            await connection.close()
