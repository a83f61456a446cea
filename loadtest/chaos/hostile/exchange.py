"""One hostile request on a connection of its own, byte by byte, and whether its answer is one that
was promised."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from lexshard.serve_app.openai.errors import TYPES_AND_CODES

LONGEST_LINE = 1 << 20
# What a client may expect: an answer; an answer or at least the end of the connection; nothing,
# because it leaves before.
ANSWER, END, LEAVES = "answer", "end", "leaves"


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """Bytes to send, in pieces with ``gap`` seconds between them, and what is expected within
    ``patience`` seconds of the first one."""

    pieces: tuple[bytes, ...]
    method: str = "POST"
    patience: float = 5.0
    expects: str = ANSWER
    gap: float = 0.0

    def begins(self) -> str:
        """Enough of it to be recognised."""
        whole = b"".join(self.pieces[:3])
        head, _, body = whole[:100_000].partition(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0]
        size = sum(map(len, self.pieces))
        return f"{line[:60]!r} {body[:60]!r}, {size:,} bytes"


@dataclass(slots=True)
class WireAnswer:
    """What came back. ``status`` 0: no answer; ``complete``: all of it has come; ``closed``: the
    server has ended the connection instead."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    closed: bool = False
    seconds: float = 0.0


async def exchange(port: int, request: HostileRequest) -> WireAnswer:
    """Sends a request and reads while it sends: an answer may come before its end."""
    answer = WireAnswer()
    started = time.monotonic()
    try:
        async with asyncio.timeout(request.patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LONGEST_LINE)
            sending = asyncio.ensure_future(_send(writer, request))
            try:
                await _read_answer(reader, request.method, answer)
                answer.complete = True
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                writer.transport.abort()
    except TimeoutError:
        pass
    except (ConnectionError, asyncio.IncompleteReadError, ValueError):
        answer.closed = True
    answer.seconds = time.monotonic() - started
    return answer


async def _send(writer: asyncio.StreamWriter, request: HostileRequest) -> None:
    for index, piece in enumerate(request.pieces):
        if index:
            await asyncio.sleep(request.gap)
        writer.write(piece)
        await writer.drain()


async def _read_answer(reader: asyncio.StreamReader, method: str, answer: WireAnswer) -> None:
    while True:  # interim answers (100 Continue) come before the real one
        words = (await _line(reader)).split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdecimal():
            raise ValueError(f"no HTTP: {words}")
        headers: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if not words[1].startswith("1"):
            break
    answer.status, answer.headers = int(words[1]), headers
    if method == "HEAD" or answer.status in (204, 304):
        return
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await _line(reader)).partition(";")[0], 16):
            answer.body += await reader.readexactly(size)
            await _line(reader)
        await _line(reader)
    elif "content-length" in headers:
        answer.body = await reader.readexactly(int(headers["content-length"]))
    else:
        answer.body = await reader.read()


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readuntil(b"\n")
    return line.decode("latin-1").rstrip("\r\n")


def breach(request: HostileRequest, answer: WireAnswer) -> str | None:
    """How an answer breaks what is promised: 2xx, 4xx, or 503 with ``Retry-After``, errors in
    OpenAI's shape, in time; but for what is no HTTP request. None where it does not."""
    if not answer.status:
        if request.expects == LEAVES or (request.expects == END and answer.closed):
            return None
        if answer.closed:
            return "closed without an answer"
        return f"no answer within {request.patience:.0f} s"
    if not answer.complete:
        return None if request.expects == LEAVES else f"status {answer.status} that broke off"
    if answer.status < 300:
        return _wrong_content(answer)
    if answer.status == 503:
        if "retry-after" not in answer.headers:
            return "503 without Retry-After"
    elif not 400 <= answer.status < 500:
        return f"status {answer.status}"
    elif answer.status in (400, 408, 422) and answer.headers.get("content-type", "").startswith(
        "text/"
    ):
        return None  # HAProxy and uvicorn have their own words for what is no HTTP request
    if request.method != "HEAD" and not is_error(answer.body, answer.status):
        return f"status {answer.status} without OpenAI's error shape"
    return None


def is_error(body: bytes, status: int) -> bool:
    """Whether a body says so in OpenAI's shape."""
    try:
        error = json.loads(body)["error"]
        return (
            set(error) == {"message", "type", "param", "code"}
            and isinstance(error["message"], str)
            and isinstance(error["param"], str | None)
            and isinstance(error["code"], str | None)
            and error["type"] == TYPES_AND_CODES[status][0]
        )
    except (ValueError, KeyError, TypeError):
        return False


def _wrong_content(answer: WireAnswer) -> str | None:
    kind = answer.headers.get("content-type", "")
    try:
        if kind.startswith("text/event-stream"):
            return _wrong_events(answer.body)
        if kind.startswith("application/json") and answer.body:
            json.loads(answer.body, parse_constant=_not_a_number)
    except ValueError as error:
        return f"status {answer.status} with a body that is no JSON: {error}"
    return None


def _wrong_events(body: bytes) -> str | None:
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    if not events or events[-1] != b"[DONE]":
        return "a stream that ended silently"
    for event in events[:-1]:
        error = json.loads(event, parse_constant=_not_a_number).get("error")
        if error is not None and error["type"] == TYPES_AND_CODES[500][0]:
            return f"a stream with {error['type']}: {error['message']}"
    return None


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
