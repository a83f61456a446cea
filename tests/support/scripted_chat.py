"""Chat completions that say what a test wrote, in place of those of an engine: what protocols that
are translated to them are tested with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from lexshard.actors.messages import FinishReason, Request, SamplingParameters, TokenLogprobs
from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.choice import Choice, Delta, OutputOptions
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.logprobs import LogprobsFormatter
from lexshard.serve_app.openai.response_writer import ReplyWriter
from lexshard.serve_app.openai.streaming import respond
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.tools.calls import CallPiece
from tests.support.mock_server import TOKENIZER, listening

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 4},
}


def delta(
    text: str = "",
    reasoning: str = "",
    *calls: CallPiece,
    first: bool = False,
    logprobs: Sequence[TokenLogprobs] = (),
    reason: FinishReason | None = None,
    stop: str | None = None,
) -> Delta:
    request = Request("a", 0, (1,), SamplingParameters())
    choice = Choice(0, request, "", OutputOptions(), TOKENIZER.token_bytes)
    choice.stop_reason = stop
    return Delta(choice, text, (1,), logprobs, (), (), (), first, reason, reasoning, calls)


def opening() -> Delta:
    """What begins a reply and says nothing."""
    return delta(first=True)


def said(text: str, *logprobs: TokenLogprobs) -> Delta:
    return delta(text, logprobs=logprobs)


def thought(text: str) -> Delta:
    return delta(reasoning=text)


def called(index: int, name: str, *pieces: str, custom: bool = False) -> list[Delta]:
    """A call with the id ``call_INDEX``, its arguments or its input in pieces."""
    began = CallPiece(index, "", f"call_{index}", name, custom)
    parts = [CallPiece(index, piece, custom=custom) for piece in pieces]
    return [delta("", "", part) for part in (began, *parts)]


def ended(reason: FinishReason, stop: str | None = None) -> Delta:
    return delta(reason=reason, stop=stop)


@dataclass
class ScriptedChat:
    """Gives every request the same ``deltas``, each in a step of its own, then fails with ``error``
    if there is one. ``bodies`` are those it was asked with; ``closed`` counts the runs that were.
    """

    deltas: Sequence[Delta]
    error: ApiError | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0

    async def reply(
        self,
        _: Any,
        request: HttpRequest,
        body: dict[str, Any],
        record: RequestRecord,
        writer: Callable[[ChatWriter], ReplyWriter],
        *,
        stream: bool,
    ) -> ASGIApp:
        """In the place of `chat_reply`."""
        self.bodies.append(body)
        generation: Any = ScriptedGeneration(self)
        made = writer(chat_writer(logprobs=body.get("top_logprobs")))
        return await respond(request, generation, made, record, stream=stream)


def chat_writer(logprobs: int | None = None) -> ChatWriter:
    formatter = LogprobsFormatter(TOKENIZER.token_bytes, False)
    return ChatWriter({}, OutputOptions(logprobs=logprobs), formatter, None, None)


class ScriptedGeneration:
    def __init__(self, chat: ScriptedChat) -> None:
        self.running = 1
        self._chat = chat

    async def batches(self) -> AsyncIterator[list[Delta]]:
        for each in self._chat.deltas:
            self.running -= each.finish_reason is not None and self._chat.error is None
            yield [each]
            await asyncio.sleep(0)
        if self._chat.error is not None:
            raise self._chat.error

    def usage(self) -> dict[str, Any]:
        return USAGE

    def close(self) -> None:
        self._chat.closed += 1


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
