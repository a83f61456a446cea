"""From what the choices of a request say to its response: whole, or chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson
from fastapi import Request, Response

from serve_app.openai.choice import Choice, Delta, OutputOptions
from serve_app.openai.generation import Generation
from serve_app.openai.reply import Reply
from serve_app.openai.streaming import DONE, EventStreamResponse, json_response, server_sent_event
from serve_app.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class Shape:
    """How an endpoint writes it. Neither part writes the header, the seed or the usage.

    ``whole`` makes the body from one delta per choice that holds everything it said; ``chunks``
    makes the chunks that tell of one delta, none where there is nothing to tell.
    """

    whole: Callable[[Reply, Sequence[Delta]], dict[str, Any]]
    chunks: Callable[[Reply, Delta], list[dict[str, Any]]]


async def respond(
    request: Request,
    reply: Reply,
    generation: Generation,
    record: RequestRecord,
    shape: Shape,
    *,
    stream: bool,
) -> Response:
    """The response to a request whose generation is about to begin."""
    if stream:
        return EventStreamResponse(_blocks(reply, generation, shape), generation, record)
    return await json_response(request, generation, _collect(reply, generation, shape))


def has_news(options: OutputOptions, delta: Delta) -> bool:
    """Whether a stream must tell of ``delta`` now: its text may be held back."""
    tells_tokens = options.tells_tokens and delta.token_ids
    return bool(delta.text or delta.finish_reason or tells_tokens)


def told_tokens(options: OutputOptions, delta: Delta) -> dict[str, Any]:
    """What a choice tells of its single tokens on request, apart from log-probabilities."""
    told: dict[str, Any] = {}
    if options.return_token_ids:
        told["token_ids"] = delta.token_ids
    if options.certificate:
        told["certificates"] = delta.certificates
    return told


async def _collect(reply: Reply, generation: Generation, shape: Shape) -> bytes:
    deltas: list[list[Delta]] = [[] for _ in generation.choices]
    async for batch in generation.batches():
        for delta in batch:
            deltas[delta.choice.index].append(delta)
    whole = [_joined(choice, deltas[choice.index]) for choice in generation.choices]
    body = {**reply.header, **shape.whole(reply, whole), "usage": generation.usage()}
    if reply.seed is not None:
        body["seed"] = reply.seed
    return orjson.dumps(body)


def _joined(choice: Choice, deltas: Sequence[Delta]) -> Delta:
    """All that ``choice`` said, as if one event had brought it."""
    return Delta(
        choice=choice,
        text="".join(delta.text for delta in deltas),
        token_ids=list(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=list(chain.from_iterable(delta.logprobs for delta in deltas)),
        offsets=list(chain.from_iterable(delta.offsets for delta in deltas)),
        certificates=list(chain.from_iterable(delta.certificates for delta in deltas)),
        first=True,
        finish_reason=choice.finish_reason,
    )


async def _blocks(reply: Reply, generation: Generation, shape: Shape) -> AsyncIterator[bytes]:
    async for batch in generation.batches():
        chunks = chain.from_iterable(_completed(reply, generation, shape, d) for d in batch)
        if block := b"".join(map(server_sent_event, chunks)):
            yield block
    closing = b""
    if reply.include_usage:
        closing = server_sent_event({**reply.header, "choices": [], "usage": generation.usage()})
    yield closing + DONE


def _completed(
    reply: Reply, generation: Generation, shape: Shape, delta: Delta
) -> Iterator[dict[str, Any]]:
    """The chunks that tell of ``delta``, with what every shape has."""
    for i, own in enumerate(shape.chunks(reply, delta)):
        chunk = {**reply.header, **own}
        if reply.continuous_usage:
            chunk["usage"] = generation.usage()
        elif reply.include_usage:
            chunk["usage"] = None
        if reply.seed is not None and delta.first and i == 0:
            chunk["seed"] = reply.seed
        yield chunk
