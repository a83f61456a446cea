"""Chat completions that say what a test wrote, in place of those of an engine: what protocols that
are translated to them are tested with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from lexshard.serve_app.openai.errors import ApiError
from tests.support.mock_server import listening

Chunk = dict[str, Any]
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 4},
}


def chunk(delta: dict[str, Any], reason: str | None = None, **fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, **fields}]}


def opening() -> Chunk:
    """What a stream begins with; of the usage, only the prompt's is known."""
    known = USAGE | {"completion_tokens": 0, "total_tokens": 20}
    return chunk({"role": "assistant", "content": ""}) | {"usage": known}


def said(text: str, **fields: Any) -> Chunk:
    return chunk({"content": text}, **fields)


def thought(text: str) -> Chunk:
    return chunk({"reasoning": text})


def called(index: int, name: str, *pieces: str, custom: bool = False) -> list[Chunk]:
    """A call with the id ``call_INDEX``, its arguments or its input in pieces."""
    kind, field = ("custom", "input") if custom else ("function", "arguments")
    began = {"index": index, "id": f"call_{index}", "type": kind, kind: {"name": name, field: ""}}
    parts = [{"index": index, kind: {field: piece}} for piece in pieces]
    return [chunk({"tool_calls": [part]}) for part in (began, *parts)]


def ended(reason: str, stop: str | None = None) -> list[Chunk]:
    last = {"choices": [], "usage": USAGE}
    return [chunk({}, reason, stop_reason=stop), last]


@dataclass
class ScriptedChat:
    """Gives every request the same ``steps``, then fails with ``error`` if there is one, or
    ``hangs``. ``bodies`` are those it was asked with; ``closed`` counts the runs that were."""

    steps: Sequence[Sequence[Chunk]]
    error: ApiError | None = None
    hangs: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0

    async def reply(self, _: Any, __: Any, body: dict[str, Any], ___: Any) -> ScriptedRun:
        """In the place of `chat_reply`."""
        self.bodies.append(body)
        return ScriptedRun(self)


class ScriptedRun:
    def __init__(self, chat: ScriptedChat) -> None:
        self._chat = chat

    async def steps(self) -> AsyncIterator[list[Chunk]]:
        for step in self._chat.steps:
            yield [*step]
            await asyncio.sleep(0)
        if self._chat.error is not None:
            raise self._chat.error
        if self._chat.hangs:
            await asyncio.Event().wait()

    def close(self) -> None:
        self._chat.closed += 1


def scripted(*chunks: Chunk | list[Chunk]) -> ScriptedChat:
    """One that says ``chunks``, each in a step of its own."""
    flat = [each for given in chunks for each in (given if isinstance(given, list) else [given])]
    return ScriptedChat([[each] for each in flat])


@contextmanager
def serving(
    chat: ScriptedChat, protocol: str, patch: pytest.MonkeyPatch, **config: Any
) -> Iterator[str]:
    """A server whose ``protocol`` (``responses``, ``messages_api``) is answered by ``chat``; yields
    its address."""
    patch.setattr(f"lexshard.serve_app.{protocol}.routes.chat_reply", chat.reply)
    with listening(**config) as url:
        yield url
