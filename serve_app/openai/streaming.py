"""A response on its way to the client, whole or as a stream, for as long as the client is there."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import ApiError, internal_error
from lexshard.serve_app.openai.generation import Generation
from lexshard.serve_app.openai.response_writer import ReplyWriter
from lexshard.serve_app.openai.workers import run_unless_disconnected
from lexshard.serve_app.request_record import RequestRecord

logger = logging.getLogger("lexshard.http")

# Tokens of a batch with log-probabilities that a thread tells of: up to 5 ms for so many.
MANY_LOGPROBS = 128
START = {"type": "http.response.start", "status": 200}
EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


async def respond(
    call: HttpCall,
    generation: Generation,
    writer: ReplyWriter,
    *,
    stream: bool,
) -> ASGIApp:
    """The response to a request whose generation is about to begin.

    Raises:
        ApiError: the engine refused or lost a sequence of a response that is no stream.
        ClientDisconnectedError: the client was gone first; its sequences are cancelled.
    """
    if stream:
        return StreamedResponse(generation, writer, call.record)
    try:
        content = await run_unless_disconnected(call.request.receive, _whole(generation, writer))
        return Response(content, media_type="application/json")
    finally:
        generation.close()


async def _whole(generation: Generation, writer: ReplyWriter) -> bytes:
    async for deltas in generation.batches():
        writer.take(deltas)
    if writer.options.tells_much:
        # Other streams go on meanwhile: a million log-probabilities take a second.
        content = await asyncio.to_thread(writer.whole, generation.usage())
    else:
        content = writer.whole(generation.usage())
    await writer.settle()
    return content


class StreamedResponse:
    """A response, as the ASGI application it is: server-sent events, written as they are made. What
    belongs to one step is one piece, the last token and the end of the stream, too.

    The status waits for the first of them: what fails before them is answered by the application,
    in the shape of the route's protocol. A later failure is told in the stream.
    """

    def __init__(self, generation: Generation, writer: ReplyWriter, record: RequestRecord) -> None:
        self._generation = generation
        self._writer = writer
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless_disconnected(receive, self._write(send))
        finally:
            self._generation.close()

    async def _write(self, send: Send) -> None:
        """Raises:
        ApiError: the response failed before it had begun.
        """
        generation, writer = self._generation, self._writer
        started, much = False, writer.options.tells_much
        try:
            async for batch in generation.batches():
                usage = generation.usage() if writer.continuous_usage else None
                if much and sum(len(delta.logprobs) for delta in batch) > MANY_LOGPROBS:
                    # An echoed prompt: other streams go on meanwhile.
                    block = await asyncio.to_thread(writer.events, batch, usage)
                else:
                    block = writer.events(batch, usage)
                if not generation.running:
                    block += writer.end(generation.usage())
                    await writer.settle()
                if not block:
                    continue
                if not started:
                    await send({**START, "headers": [*EVENT_STREAM_HEADERS]})
                    started = True
                more = generation.running > 0
                await send({"type": "http.response.body", "body": block, "more_body": more})
            return
        except ApiError as error:
            failure = error
        except Exception:
            request_id = self._record.request_id
            told = {"fields": {"request_id": request_id}}
            logger.exception("id=%s failed", request_id, extra=told)
            failure = internal_error(request_id)
        if not started:
            raise failure
        self._record.status = failure.status  # so it is counted and logged: 200 was too early
        last = writer.failed(failure)
        await send({"type": "http.response.body", "body": last, "more_body": False})
