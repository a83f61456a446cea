"""A connection that hears an answer piece by piece, each with the moment it came."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

from lexshard.loadtest.event_stream import StreamedAnswer, refusal


class EndpointConnection(asyncio.Protocol):
    """One connection to an endpoint: one request at a time. ``is_open`` as long as another one may
    follow."""

    def __init__(self) -> None:
        self.is_open = True
        self._answer = StreamedAnswer()
        self._refused = b""
        self._fault: asyncio.Future[str] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    async def ask(self, request: bytes, answer: StreamedAnswer) -> str:
        """Sends a whole HTTP request; returns why its ``answer`` is none, or nothing."""
        if not self.is_open:
            return "connection closed by the server before it was used"
        self._answer, self._refused = answer, b""
        self._parser = httptools.HttpResponseParser(self)
        self._fault = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._fault

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._end(f"no HTTP: {error}")
            self.close()

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._answer.feed(body, self._now)
        else:
            self._refused += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._end(self._answer.fault if status == 200 else refusal(status, self._refused))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer.done:  # a body that only the end of its connection ends
            self._end(self._answer.fault)
        else:
            self._end(f"connection closed by the server{f': {error}' if error else ''}")

    def _end(self, fault: str) -> None:
        if self._fault is not None and not self._fault.done():
            self._fault.set_result(fault)


class ConnectionPool:
    """Connections to one endpoint, kept for the next request as HTTP clients do."""

    def __init__(self, url: str, key: str | None) -> None:
        self._address = urlsplit(url)
        self._key = key
        self._idle: list[EndpointConnection] = []

    def request(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST request."""
        lines = [
            f"POST {self._address.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {self._address.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {self._key}"] if self._key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def take(self) -> EndpointConnection:
        """An idle connection, or a new one. Raises OSError if there is nobody to connect to."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        secure = self._address.scheme == "https"
        _, opened = await asyncio.get_running_loop().create_connection(
            EndpointConnection,
            self._address.hostname or "",
            self._address.port or (443 if secure else 80),
            ssl=ssl.create_default_context() if secure else None,
        )
        return opened

    def give_back(self, connection: EndpointConnection) -> None:
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
