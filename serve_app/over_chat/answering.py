"""A reply of such a protocol on its way to the client, whole or as a stream, for as long as the
client is there."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lexshard.serve_app.openai.errors import ApiError, internal_error, json_response
from lexshard.serve_app.openai.streaming import EVENT_STREAM_HEADERS, START
from lexshard.serve_app.openai.workers import run_unless_disconnected
from lexshard.serve_app.request_record import RequestRecord

logger = logging.getLogger("lexshard.http")

Keep = Callable[[dict[str, Any]], Awaitable[None]]


class ChatRun(Protocol):
    """A chat completion that was let in. ``close`` must be called whatever happens: it cancels what
    still runs."""

    def steps(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The chunks of ``POST /v1/chat/completions``, as dictionaries; those of one step of the
        engine come together.

        Raises:
            ApiError: the engine refused or lost the sequence.
        """

    def close(self) -> None: ...


class ReplyWriter(ABC):
    """Writes one reply of a protocol, from the chunks of a chat completion."""

    @abstractmethod
    def take(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The events that tell of a chunk, each with its ``type``."""

    @abstractmethod
    def end(self) -> list[dict[str, Any]]:
        """The events that end a stream, when all chunks were taken."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole reply, after `end`."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """The events that end a stream that fails."""


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event of its ``type``."""
    return b"event: " + payload["type"].encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


async def respond_with(
    request: Request,
    run: ChatRun,
    writer: ReplyWriter,
    record: RequestRecord,
    *,
    stream: bool,
    keep: Keep | None = None,
) -> ASGIApp:
    """The response to a request whose chat completion is about to begin. ``keep`` is given the
    whole reply before the client hears of its end, so that it may refer to it then.

    Raises:
        ApiError: the engine refused or lost the sequence of a response that is no stream.
        ClientDisconnectedError: the client was gone first; the sequence is cancelled.
    """
    if stream:
        return TranslatedStream(run, writer, record, keep)
    try:
        whole = await run_unless_disconnected(request.receive, _whole(run, writer, keep))
        return json_response(whole)
    finally:
        run.close()


async def _whole(run: ChatRun, writer: ReplyWriter, keep: Keep | None) -> dict[str, Any]:
    async for chunks in run.steps():
        for chunk in chunks:
            writer.take(chunk)
    writer.end()
    whole = writer.whole()
    if keep is not None:
        await keep(whole)
    return whole


class TranslatedStream:
    """A response, as the ASGI application it is: server-sent events.

    As in a stream of chat completions, the status waits for the first events, and a later failure
    is told in the stream.
    """

    def __init__(
        self, run: ChatRun, writer: ReplyWriter, record: RequestRecord, keep: Keep | None
    ) -> None:
        self._run = run
        self._writer = writer
        self._record = record
        self._keep = keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless_disconnected(receive, self._write(send))
        finally:
            self._run.close()

    async def _write(self, send: Send) -> None:
        """Raises:
        ApiError: the reply failed before it had begun: the application answers, in the shape of
            the route's protocol.
        """
        started = False
        try:
            async for events in self._steps():
                if not started:
                    await send({**START, "headers": [*EVENT_STREAM_HEADERS]})
                    started = True
                await _send(send, events)
            failure = None
        except ApiError as error:
            failure = error
        except Exception:
            request_id = self._record.request_id
            told = {"fields": {"request_id": request_id}}
            logger.exception("id=%s failed", request_id, extra=told)
            failure = internal_error(request_id)
        if failure is not None and not started:
            raise failure
        if failure is not None:
            await _send(send, self._writer.failed(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _steps(self) -> AsyncIterator[list[dict[str, Any]]]:
        async for chunks in self._run.steps():
            events = [told for chunk in chunks for told in self._writer.take(chunk)]
            if events:
                yield events
        last = self._writer.end()
        if self._keep is not None:
            await self._keep(self._writer.whole())
        yield last


async def _send(send: Send, events: list[dict[str, Any]]) -> None:
    body = b"".join(map(event, events))
    await send({"type": "http.response.body", "body": body, "more_body": True})
