"""Good requests, what their clients hear, and whether that is what they were promised.

The same seed gives the same text whatever happens beside it, so what a request says undisturbed
is known, and everything it says later can be held against that.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lexshard.loadtest.chaos.hostile.exchange import is_error

STORY = Path(__file__).parent.parent / "data" / "a_kidnapped_santa_claus.txt"
CONTROLS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.2, "frequency_penalty": 0.3},
)
# How a conversation ended for the client.
WHOLE, TOLD, BROKEN, SILENT, UNREACHABLE, HUNG = (
    "whole",
    "told",
    "broken",
    "silent",
    "unreachable",
    "hung",
)
# What became of a request.
KEPT, REFUSED, CUT, WRONG = "kept", "refused", "cut", "wrong"


@dataclass(frozen=True, slots=True)
class SeededRequest:
    """A request that says the same whenever it is answered."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Heard:
    """What a client has heard so far; ``ended`` says how it ended, empty while it has not.

    Times are seconds of the monotonic clock. ``shaped``: an error has OpenAI's shape.
    """

    sent: float = field(default_factory=time.monotonic)
    answered: float = 0.0
    status: int = 0
    retry_after: str | None = None
    shaped: bool = True
    texts: dict[int, str] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    ended: str = ""
    message: str = ""

    @property
    def seconds(self) -> float:
        return (self.answered or time.monotonic()) - self.sent

    @property
    def has_begun(self) -> bool:
        return bool(self.ended) or any(self.texts.values())

    def take(self, choice: dict[str, Any]) -> None:
        """A choice of a response or a chunk of a completion or a conversation."""
        index = choice["index"]
        words = choice.get("text")
        if words is None:
            words = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        self.texts[index] = self.texts.get(index, "") + words
        if choice.get("finish_reason"):
            self.finished[index] = choice["finish_reason"]

    def take_line(self, line: str) -> None:
        """A line of a stream of events."""
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.ended = self.ended or WHOLE
        elif data:
            event = json.loads(data)
            if "error" in event:
                self.ended, self.message = TOLD, event["error"]["message"]
            for choice in event.get("choices", ()):
                self.take(choice)


def seeded_requests(
    seed: int, count: int, tokens: int, *, stream: bool = True
) -> list[SeededRequest]:
    """``count`` requests for ``tokens`` tokens each: every control in turn, every fourth one a
    conversation, prompts of a story."""
    chance = random.Random(f"requests {seed}")
    story = " ".join(STORY.read_text(encoding="utf-8").split())
    requests = []
    for index in range(count):
        start = chance.randrange(len(story) - 400)
        text = story[start : start + chance.randrange(20, 400)]
        body = {
            "max_tokens": tokens,
            "seed": chance.randrange(2**31),
            "ignore_eos": True,
            "stream": stream,
            **CONTROLS[index % len(CONTROLS)],
        }
        if index % 4 == 3:
            body["messages"] = [{"role": "user", "content": text}]
            requests.append(SeededRequest("/v1/chat/completions", body))
        else:
            body["prompt"] = text
            requests.append(SeededRequest("/v1/completions", body))
    return requests


def new_client(url: str, seconds: float) -> httpx.AsyncClient:
    """A client whose every request has a connection of its own and ``seconds`` between two words
    of its answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(seconds, connect=5.0)
    return httpx.AsyncClient(
        base_url=url, limits=limits, timeout=timeout, verify=False, trust_env=False
    )


async def listen(client: httpx.AsyncClient, request: SeededRequest, heard: Heard) -> Heard:
    """Sends a request and hears it out."""
    try:
        async with client.stream("POST", request.path, json=request.body) as response:
            heard.status = response.status_code
            heard.retry_after = response.headers.get("retry-after")
            if response.status_code == 200 and request.body.get("stream"):
                async for line in response.aiter_lines():
                    heard.take_line(line)
                heard.ended = heard.ended or SILENT
            else:
                _take_whole(heard, await response.aread())
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        heard.ended, heard.message = UNREACHABLE, repr(error)
    except httpx.ReadTimeout as error:
        heard.ended, heard.message = HUNG, repr(error)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        heard.ended, heard.message = BROKEN, repr(error)
    heard.answered = time.monotonic()
    return heard


def _take_whole(heard: Heard, content: bytes) -> None:
    if heard.status != 200:
        heard.ended, heard.message = TOLD, content[:300].decode(errors="replace")
        heard.shaped = is_error(content, heard.status)
        return
    for choice in json.loads(content)["choices"]:
        heard.take(choice)
    heard.ended = WHOLE


def fate(heard: Heard, expected: Heard) -> str:
    """What became of a request that says ``expected`` undisturbed.

    A stream may be cut, but visibly, and what was heard of it must be right.
    """
    if heard.status == 503 and heard.retry_after is not None and heard.shaped:
        return REFUSED
    if heard.status not in (0, 200):
        return WRONG
    if heard.ended == WHOLE:
        same = heard.texts == expected.texts and heard.finished == expected.finished
        return KEPT if same else WRONG
    said_right = all(
        expected.texts.get(index, "").startswith(text) for index, text in heard.texts.items()
    )
    visibly = heard.ended in (TOLD, BROKEN, UNREACHABLE)
    return CUT if visibly and said_right else WRONG


def difference(heard: Heard, expected: Heard) -> str:
    """What is wrong with a request, in a line."""
    if heard.status not in (0, 200):
        return f"status {heard.status} | {heard.message}"
    if heard.ended in (SILENT, HUNG, ""):
        how = {SILENT: "ended silently with text missing", HUNG: "hung"}
        return f"{how.get(heard.ended, 'did not end')} | after {heard.texts}"
    return f"wrong tokens | {heard.texts} {heard.finished}, not {expected.texts}"


async def undisturbed(
    client: httpx.AsyncClient, requests: Sequence[SeededRequest], at_once: int = 1
) -> list[Heard]:
    """What requests say when nothing happens, ``at_once`` of them beside each other.

    Raises:
        RuntimeError: even then one was not answered as a whole.
    """
    turns = asyncio.Semaphore(at_once)

    async def one(request: SeededRequest) -> Heard:
        async with turns:
            return await listen(client, request, Heard())

    answers = await asyncio.gather(*map(one, requests))
    for heard in answers:
        if heard.ended != WHOLE:
            raise RuntimeError(f"an undisturbed request {heard.ended}: {heard.message}")
    return list(answers)
