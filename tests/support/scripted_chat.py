"""Chat completions that say what a test wrote, in place of those of an engine: what protocols that
are translated to them are tested with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from starlette.types import ASGIApp

from lexshard.actors.messages import FinishReason, Request, SamplingParameters, TokenLogprobs
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.choice import Choice, Delta, OutputOptions
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.logprobs import LogprobsFormatter
from lexshard.serve_app.openai.streaming import respond
from lexshard.serve_app.tools.calls import CallPiece
from tests.support.mock_server import TOKENIZER, listening

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 4},
}


def delta(text: str = "", stop: str | None = None, **fields: Any) -> Delta:
    request = Request("a", 0, (1,), SamplingParameters())
    choice = Choice(0, request, "", OutputOptions(), TOKENIZER.token_bytes, stop_reason=stop)
    several = dict.fromkeys(("logprobs", "offsets", "certificates", "origins"), ())
    plain = {"token_ids": (1,), "first": False, "finish_reason": None, **several}
    parts = (*filter(None, [text]), *fields.get("calls", ()))
    return Delta(choice, text, parts=parts, **plain | fields)  # type: ignore[arg-type]


opening = partial(delta, first=True)


def said(text: str, *logprobs: TokenLogprobs) -> Delta:
    return delta(text, logprobs=logprobs, said=[("text", len(logprobs))])


def thought(text: str) -> Delta:
    return delta(reasoning=text)


def called(index: int, name: str, *pieces: str, custom: bool = False) -> list[Delta]:
    """A call with the id ``call_INDEX``, its arguments or its input in pieces."""
    began = CallPiece(index, "", f"call_{index}", name, custom)
    parts = [CallPiece(index, piece, custom=custom) for piece in pieces]
    return [delta(calls=[part]) for part in (began, *parts)]


def ended(reason: FinishReason, stop: str | None = None) -> Delta:
    return delta(finish_reason=reason, stop=stop)


@dataclass
class ScriptedChat:
    """Gives every request the same ``deltas``, each in a step of its own, then fails with ``error``
    if there is one. ``bodies`` are those it was asked with; ``closed`` counts its runs."""

    deltas: Sequence[Delta]
    error: ApiError | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0
    running: int = 1

    def __post_init__(self) -> None:
        for each in self.deltas:
            each.choice.called = any(every.calls for every in self.deltas)

    async def reply(self, call: HttpCall, body: Any, writer: Any, *, stream: bool) -> ASGIApp:
        """In the place of `chat_reply`; it is the generation, too."""
        self.bodies.append(body)
        self.running = 1
        made = writer(chat_writer(logprobs=body.get("top_logprobs")))
        return await respond(call, self, made, stream=stream)  # type: ignore[arg-type]

    async def batches(self) -> AsyncIterator[list[Delta]]:
        for each in self.deltas:
            self.running -= each.finish_reason is not None and self.error is None
            yield [each]
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    def usage(self) -> dict[str, Any]:
        return USAGE

    def close(self) -> None:
        self.closed += 1


def chat_writer(logprobs: int | None = None) -> ChatWriter:
    formatter = LogprobsFormatter(TOKENIZER.token_bytes, False)
    return ChatWriter({}, OutputOptions(logprobs=logprobs), formatter, None, None)


def scripted(*deltas: Delta | list[Delta]) -> ScriptedChat:
    flat = [each for given in deltas for each in (given if isinstance(given, list) else [given])]
    return ScriptedChat(flat)


@contextmanager
def serving(
    chat: ScriptedChat, protocol: str, patch: pytest.MonkeyPatch, **config: Any
) -> Iterator[str]:
    """A server whose ``protocol`` (``responses``, ``messages_api``) is answered by ``chat``; yields
    its address."""
    patch.setattr(f"lexshard.serve_app.{protocol}.routes.chat_reply", chat.reply)
    with listening(**config) as url:
        yield url
