"""The one HTTP client: it hears an answer piece by piece, each with the moment it came.

    client = Client("http://127.0.0.1:8000")
    stream = StreamedAnswer()
    answer = await client.post("/v1/completions", body, stream)
    assert answer.ended == WHOLE and not stream.fault

HTTP clients that iterate over lines wait for blocks of 1 KB: several tokens arrive at one moment
then, the first of them late. Here a piece costs a call of a parser in C and one of its listener.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import orjson

DONE = b"[DONE]"
SECONDS = 300.0  # for a whole answer, where nothing else is said
HEALTH_SECONDS = 10.0
# How an answer ended: all of it came; the server closed the connection before, or spoke no HTTP; it
# was not whole in time; there was nothing to connect to.
WHOLE, CLOSED, LATE, UNREACHABLE = "whole", "closed", "late", "unreachable"
_SHOWN = 200  # characters of a message from elsewhere


class Listener(Protocol):
    """What hears the body of an answer with status 200."""

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that came at ``now``, in seconds of ``time.perf_counter``."""
        ...


@dataclass(slots=True)
class HttpAnswer:
    """What came back. ``status`` 0: nothing; ``body``: where no listener took it; ``fault`` says
    why it is not whole. It took ``seconds`` from ``began`` on (of ``time.perf_counter``)."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: str = ""
    fault: str = ""
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def json(self) -> Any:
        """Raises ValueError where the body is none."""
        return orjson.loads(self.body)


class EventReader:
    """Takes server-sent events apart, wherever the network cuts them. Lines end with ``\\n`` or
    ``\\r\\n``; comments and fields other than ``data`` are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in these bytes."""
        events = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class StreamedAnswer:
    """What was heard of one streamed completion or conversation, and when.

    ``pieces`` are the times at which text came (reasoning and calls of tools, too): an empty first
    delta that names the role is none, as in AIPerf. ``heard`` is when the last event with a choice
    came.
    ``texts`` and ``finished`` (the finish reasons) are those of each choice.
    """

    def __init__(self) -> None:
        self.pieces: list[float] = []
        self.heard: float | None = None
        self.texts: dict[int, str] = {}
        self.finished: dict[int, str] = {}
        self.done = False
        self.error = ""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._events = EventReader()

    def feed(self, data: bytes, now: float) -> None:
        for event in self._events.feed(data):
            self._take(event, now)

    @property
    def output_tokens(self) -> int:
        """As the server counts them; where it does not tell, one for every piece."""
        return len(self.pieces) if self.completion_tokens is None else self.completion_tokens

    @property
    def fault(self) -> str:
        """Why this is no whole answer; empty if it is one."""
        if self.error:
            return self.error
        if self.heard is None:
            return "stream without a choice"
        if not self.finished:
            return "stream ended without a finish_reason"
        return "" if self.done else "stream ended without [DONE]"

    def take_choice(self, choice: dict[str, Any], now: float) -> None:
        """A choice of an event, or of an answer that is not streamed."""
        self.heard = now
        said = choice.get("delta") or choice.get("message") or choice
        words = said.get("text") or said.get("content") or ""
        thought = said.get("reasoning") or said.get("reasoning_content")
        if words or thought or said.get("tool_calls"):
            self.pieces.append(now)
        index = choice.get("index", 0)
        self.texts[index] = self.texts.get(index, "") + words
        if reason := choice.get("finish_reason"):
            self.finished[index] = reason

    def _take(self, event: bytes, now: float) -> None:
        if event == DONE:
            self.done = True
            return
        try:
            fields = orjson.loads(event)
        except orjson.JSONDecodeError:
            self._fail(f"event is no JSON: {event[:_SHOWN].decode(errors='replace')}")
            return
        if not isinstance(fields, dict):
            self._fail("event is no object")
        elif self.done:
            self._fail("event after [DONE]")
        elif "error" in fields:
            self._fail(f"error event: {told(fields)}")
        else:
            if usage := fields.get("usage"):
                self.prompt_tokens = usage.get("prompt_tokens")
                self.completion_tokens = usage.get("completion_tokens")
            for choice in fields.get("choices") or ():
                self.take_choice(choice, now)

    def _fail(self, reason: str) -> None:
        self.error = self.error or reason


class Connection(asyncio.Protocol):
    """One connection, one request at a time. ``is_open`` as long as another one may follow."""

    def __init__(self) -> None:
        self.is_open = True
        self._answer = HttpAnswer()
        self._listener: Listener | None = None
        self._method = ""
        self._ended: asyncio.Future[None] | None = None

    async def ask(
        self,
        pieces: Sequence[bytes],
        answer: HttpAnswer,
        listener: Listener | None = None,
        *,
        method: str = "POST",
        gap: float = 0.0,
    ) -> None:
        """Sends a request, ``gap`` seconds between its pieces, and fills in its ``answer``, which
        may come before all are sent."""
        self._answer, self._listener, self._method = answer, listener, method
        if not self.is_open:
            answer.ended, answer.fault = (
                CLOSED,
                "connection closed by the server before it was used",
            )
            return
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(pieces[0])
        sending = asyncio.ensure_future(self._send(pieces[1:], gap)) if pieces[1:] else None
        try:
            await self._ended
        finally:
            if sending is not None:
                sending.cancel()

    def close(self) -> None:
        """At once, whatever is still on its way."""
        self.is_open = False
        self._transport.abort()

    async def _send(self, pieces: Sequence[bytes], gap: float) -> None:
        for piece in pieces:
            await asyncio.sleep(gap)
            self._transport.write(piece)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._ended is None or self._ended.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._end(CLOSED, f"no HTTP: {error}")
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        if self._method == "HEAD":
            self.is_open = False  # the parser waits for a body
            self._end(WHOLE)

    def on_body(self, body: bytes) -> None:
        if self._listener is not None and self._answer.status == 200:
            self._listener.feed(body, self._now)
        else:
            self._answer.body += body

    def on_message_complete(self) -> None:
        if 100 <= self._answer.status < 200:  # an interim answer: the real one follows
            self._answer.headers.clear()
            return
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._end(WHOLE)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        headers = self._answer.headers
        until_closed = not {"content-length", "transfer-encoding"} & headers.keys()
        if self._answer.status >= 200 and until_closed:
            self._end(WHOLE)
        else:
            self._end(CLOSED, f"connection closed by the server{f': {error}' if error else ''}")

    def _end(self, how: str, fault: str = "") -> None:
        if self._ended is not None and not self._ended.done():
            self._answer.ended, self._answer.fault = how, fault
            self._ended.set_result(None)


class Client:
    """Requests to one server, whose connections are kept for the next one as HTTP clients do, or
    not. ``key`` is that of its API; ``seconds`` is how long a whole answer may take."""

    def __init__(
        self, url: str, key: str | None = None, *, seconds: float = SECONDS, keep: bool = True
    ) -> None:
        self._address = urlsplit(url)
        self._key = key
        self._seconds = seconds
        self._keep = keep
        self._idle: list[Connection] = []

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        lines = [
            f"{method} {self._address.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {self._address.netloc}",
            *(["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []),
            *([f"Authorization: Bearer {self._key}"] if self._key else []),
            *([] if self._keep else ["Connection: close"]),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def get(self, path: str) -> HttpAnswer:
        return await self.send([self.request("GET", path)], method="GET")

    async def post(
        self, path: str, body: dict[str, Any] | bytes, listener: Listener | None = None
    ) -> HttpAnswer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send([self.request("POST", path, data)], listener)

    async def send(
        self,
        pieces: Sequence[bytes],
        listener: Listener | None = None,
        *,
        method: str = "POST",
        gap: float = 0.0,
    ) -> HttpAnswer:
        """The answer to a request of these bytes, whatever they are; raises nothing. Who is
        cancelled leaves: the connection is closed."""
        answer, connection = HttpAnswer(), None
        try:
            async with asyncio.timeout(self._seconds):
                connection = await self._take()
                await connection.ask(pieces, answer, listener, method=method, gap=gap)
        except TimeoutError:
            answer.ended, answer.fault = LATE, f"no whole answer within {self._seconds:g} s"
        except OSError as error:
            answer.ended, answer.fault = UNREACHABLE, f"no connection: {error.strerror or error}"
        finally:
            if connection is not None:
                self._give_back(connection, answer)
        answer.seconds = time.perf_counter() - answer.began
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _take(self) -> Connection:
        """An idle connection, or a new one. Raises OSError if there is nothing to connect to."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        secure = self._address.scheme == "https"
        _, opened = await asyncio.get_running_loop().create_connection(
            Connection,
            self._address.hostname or "",
            self._address.port or (443 if secure else 80),
            ssl=ssl.create_default_context() if secure else None,
        )
        return opened

    def _give_back(self, connection: Connection, answer: HttpAnswer) -> None:
        if self._keep and connection.is_open and answer.ended == WHOLE:
            self._idle.append(connection)
        else:
            connection.close()


async def once(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    key: str | None = None,
    seconds: float = SECONDS,
) -> HttpAnswer:
    """One request on a connection of its own: GET, or POST where there is a body."""
    client = Client(url, key, seconds=seconds, keep=False)
    return await (client.get(path) if body is None else client.post(path, body))


def is_healthy(url: str) -> bool:
    """Whether a server is well: what ``/health`` says, else whether there is ``/v1/models``."""
    answer = asyncio.run(once(url, "/health", seconds=HEALTH_SECONDS))
    if answer.status == 404:
        answer = asyncio.run(once(url, "/v1/models", seconds=HEALTH_SECONDS))
    return answer.status == 200


def fault_of(answer: HttpAnswer, stream: StreamedAnswer) -> str:
    """Why a streamed request has no whole answer, in a line; empty if it has."""
    if answer.fault:
        return answer.fault
    return stream.fault if answer.status == 200 else refusal(answer.status, answer.body)


def refusal(status: int, body: bytes) -> str:
    """The reason of an answer that is no stream, in a line: its status and what it says."""
    fields: Any = None
    with suppress(orjson.JSONDecodeError):
        fields = orjson.loads(body)
    if fields is None:
        return f"status {status}: {body[:_SHOWN].decode(errors='replace')}".strip(" :\n")
    return f"status {status}: {told(fields)}"


def told(fields: Any) -> str:
    """The message of an error of OpenAI's shape, or of whatever shape it has."""
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_SHOWN]
