"""The body of a request: read within limits of size and time, parsed, bounded before anything is
made of it and with one meaning, and understood beside the loop where it is long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
from starlette.requests import Request

from lexshard.cluster.ingress import BODY_SECONDS
from lexshard.serve_app.body_room import MAX_JSON_NAMES, MAX_JSON_VALUES, HeldBody, holds_too_much
from lexshard.serve_app.openai.errors import (
    ApiError,
    ClientDisconnectedError,
    bad_request,
    shortened,
)
from lexshard.serve_app.openai.protocol import may_hold_long_integers
from lexshard.serve_app.openai.workers import Returned
from lexshard.serve_app.server_state import ServerState


def decoded(body: bytes) -> Any:
    """What a JSON body holds.

    Raises:
        ApiError: 400 for one that is no JSON, holds too much or an integer of more than 64 bits, or
            a name twice: of that parsers keep one or the other, and what a proxy has checked would
            not be what is done.
    """
    if holds_too_much(body):
        raise bad_request(
            f"the body holds more than {MAX_JSON_VALUES} values or {MAX_JSON_NAMES} names"
        )
    try:
        value = orjson.loads(body)
        again = orjson.dumps(value)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    except orjson.JSONEncodeError as error:
        raise bad_request("the body is nested too deeply") from error
    # A name that was given twice is missing there, and so is its colon. Only an escaped colon may
    # make up for it.
    twice = body.count(b":") != again.count(b":") or b"\\u003" in body
    if twice or may_hold_long_integers(body):
        json.loads(body, object_pairs_hook=_names_once, parse_int=_of_64_bits)
    return value


def _of_64_bits(digits: str) -> None:
    """Raises:
    ApiError: 400 for an integer of which a float has been made.
    """
    if not -(2**63) <= int(digits) < 2**64:
        raise bad_request(f"the body holds an integer of more than 64 bits: {shortened(digits)}")


def _names_once(pairs: list[tuple[str, Any]]) -> None:
    """Raises:
    ApiError: 400 for a name that comes twice.
    """
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            name = shortened(name)
            raise bad_request(f"the body has '{name}' twice in one object", name)
        seen.add(name)


# Bodies up to here are parsed and understood on the event loop: as a chat of 800 messages, which is
# what takes longest, in 5 ms. One of 16,000 would hold up every stream for 90.
READ_AT_ONCE = 32 * 1024
# What is read of a body that is refused before the client is told.
MAX_DRAINED_BYTES = 256 * 1024 * 1024
MAX_DRAINING_SECONDS = 10.0


async def read_json(
    request: Request, state: ServerState, client: str, understand: Callable[[Any], Returned]
) -> Returned:
    """What ``understand`` makes of the decoded body, held in the room for bodies until then. Both
    are one piece of work: a decoded body is many times as large, and does not wait.

    Raises:
        ApiError: 413 for a body larger than configured, 408 for one that does not arrive, 429 and
            503 for one that finds no room, 400 for one that is no JSON; what ``understand`` raises.
        ClientDisconnectedError: the client left while sending.
    """
    with state.bodies.body(client) as held:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(request, state.config.max_body_bytes, held)
        except TimeoutError as error:
            message = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from error

        def read() -> Returned:
            return understand(decoded(body))

        if len(body) <= READ_AT_ONCE:
            return read()
        return await state.tokenizer.workers.run(len(body), read, request.receive)


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
