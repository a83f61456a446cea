"""A reply of such a protocol on its way to the client, whole or as a stream, for as long as the
client is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp

from lexshard.serve_app.openai.errors import ApiError, json_response
from lexshard.serve_app.openai.streaming import ServerSentEvents
from lexshard.serve_app.openai.workers import run_unless_disconnected
from lexshard.serve_app.request_record import RequestRecord

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


class TranslatedStream(ServerSentEvents):
    """The events of one reply."""

    def __init__(
        self, run: ChatRun, writer: ReplyWriter, record: RequestRecord, keep: Keep | None
    ) -> None:
        super().__init__(record)
        self._run = run
        self._writer = writer
        self._keep = keep

    async def blocks(self) -> AsyncIterator[tuple[bytes, bool]]:
        async for chunks in self._run.steps():
            told = [event(each) for chunk in chunks for each in self._writer.take(chunk)]
            if told:
                yield b"".join(told), True
        last = self._writer.end()
        if self._keep is not None:
            await self._keep(self._writer.whole())
        yield b"".join(map(event, last)), False

    def failed(self, error: ApiError) -> bytes:
        return b"".join(map(event, self._writer.failed(error)))

    def close(self) -> None:
        self._run.close()
