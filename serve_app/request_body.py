"""The body of a request: read within limits of size and time, and parsed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.requests import Request

from lexshard.cluster.ingress import BODY_SECONDS
from lexshard.serve_app.body_room import HeldBody
from lexshard.serve_app.json_body import decoded
from lexshard.serve_app.openai.errors import ApiError, ClientDisconnectedError
from lexshard.serve_app.server_state import ServerState

# Bodies up to here are parsed on the event loop.
PARSED_AT_ONCE = 256 * 1024
# What is read of a body that is refused before the client is told.
MAX_DRAINED_BYTES = 256 * 1024 * 1024
MAX_DRAINING_SECONDS = 10.0


async def read_json(request: Request, state: ServerState, client: str) -> Any:
    """The decoded body, held in the room for bodies until it is decoded.

    Raises:
        ApiError: 413 for a body larger than configured, 408 for one that does not arrive, 429 and
            503 for one that finds no room, 400 for one that is no JSON.
        ClientDisconnectedError: the client left while sending.
    """
    with state.bodies.body(client) as held:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(request, state.config.max_body_bytes, held)
        except TimeoutError as error:
            message = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from error
        if len(body) <= PARSED_AT_ONCE:
            return decoded(body)
        return await state.tokenizer.workers.run(len(body), lambda: decoded(body), request.receive)


async def _read_body(request: Request, limit: int, held: HeldBody) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes")
    header = request.headers.get("content-length", "")
    declared = int(header[:20]) if header.isdecimal() else 0
    body = bytearray()
    more = True
    try:
        if declared > limit:
            raise too_large
        await held.announce(declared)
        while more:
            part, more = await _receive(request)
            if len(body) + len(part) > limit:
                raise too_large
            held.cover(len(body) + len(part))
            body += part
    except ApiError as error:
        body.clear()
        held.release()
        if more and not await _drained(request):
            error.headers["Connection"] = "close"
        raise
    return bytes(body)


async def _drained(request: Request) -> bool:
    """Forgets the rest of a body, as far as that is reasonable; whether that was all of it.

    Most clients listen only when they have sent everything, and a connection that is closed before
    is reset: they would never see the answer.
    """
    left = MAX_DRAINED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_DRAINING_SECONDS):
            while left > 0:
                part, more = await _receive(request)
                left -= len(part)
                if not more:
                    return True
    return False


async def _receive(request: Request) -> tuple[bytes, bool]:
    """The next part of the body, and whether more follows."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError
    return message.get("body", b""), message.get("more_body", False)
