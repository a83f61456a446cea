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
from typing import Any

from lexshard.loadtest.chaos.report import ChaosRow
from lexshard.loadtest.client import (
    CLOSED,
    LATE,
    UNREACHABLE,
    WHOLE,
    Client,
    HttpAnswer,
    StreamedAnswer,
)
from lexshard.loadtest.prompts import STORY
from lexshard.serve_app.openai.errors import TYPES_AND_CODES

CONTROLS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.2, "frequency_penalty": 0.3},
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
    """What a client has heard so far. Times are seconds of the monotonic clock; ``answered`` is 0
    while it has not ended."""

    answer: HttpAnswer = field(default_factory=HttpAnswer)
    stream: StreamedAnswer = field(default_factory=StreamedAnswer)
    sent: float = field(default_factory=time.monotonic)
    answered: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.answered or time.monotonic()) - self.sent

    @property
    def has_begun(self) -> bool:
        return bool(self.answered) or any(self.stream.texts.values())

    @property
    def whole(self) -> bool:
        """Whether all that was asked for has come."""
        return self.answer.ended == WHOLE and self.answer.status == 200 and not self.stream.fault

    @property
    def visibly_cut(self) -> bool:
        """Whether the client can see that text is missing: it was told, or the connection broke."""
        return bool(self.stream.error) or self.answer.ended in (CLOSED, UNREACHABLE)

    @property
    def refused(self) -> bool:
        """Whether it was told to come again later, in OpenAI's shape."""
        told = "retry-after" in self.answer.headers and is_error(self.answer.body, 503)
        return self.answer.status == 503 and told

    @property
    def message(self) -> str:
        answer = self.answer
        return answer.fault or self.stream.fault or answer.body[:300].decode(errors="replace")


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
        body = {"max_tokens": tokens, "seed": chance.randrange(2**31), "ignore_eos": True}
        body |= {"stream": stream, **CONTROLS[index % len(CONTROLS)]}
        if index % 4 == 3:
            asked = {"messages": [{"role": "user", "content": text}]}
            requests.append(SeededRequest("/v1/chat/completions", body | asked))
        else:
            requests.append(SeededRequest("/v1/completions", body | {"prompt": text}))
    return requests


def new_client(url: str, seconds: float) -> Client:
    """One whose every request has a connection of its own and ``seconds`` for its answer."""
    return Client(url, seconds=seconds, keep=False)


async def listen(client: Client, request: SeededRequest, heard: Heard | None = None) -> Heard:
    """Sends a request and hears it out."""
    heard = Heard() if heard is None else heard
    streamed = request.body.get("stream")
    listener = heard.stream if streamed else None
    heard.answer = await client.post(request.path, request.body, listener)
    heard.answered = time.monotonic()
    if not streamed and heard.answer.ended == WHOLE and heard.answer.status == 200:
        for choice in heard.answer.json()["choices"]:
            heard.stream.take_choice(choice, 0.0)
        heard.stream.done = True
    return heard


async def heard_out(
    client: Client, requests: Sequence[SeededRequest], at_once: int = 1
) -> list[Heard]:
    """What the clients of all requests heard, ``at_once`` of them beside each other."""
    turns = asyncio.Semaphore(at_once)

    async def one(request: SeededRequest) -> Heard:
        async with turns:
            return await listen(client, request)

    return list(await asyncio.gather(*map(one, requests)))


async def undisturbed(
    client: Client, requests: Sequence[SeededRequest], at_once: int = 1
) -> list[Heard]:
    """What requests say when nothing happens. Raises RuntimeError where even then one was not
    answered as a whole."""
    answers = await heard_out(client, requests, at_once)
    for heard in answers:
        if not heard.whole:
            raise RuntimeError(f"an undisturbed request was not whole: {heard.message}")
    return answers


def fate(heard: Heard, expected: Heard) -> tuple[str, str]:
    """What became of a request that says ``expected`` undisturbed, and why in a line where it was
    not kept. A stream may be cut, but visibly, and what was heard of it must be right."""
    answer, said, wanted = heard.answer, heard.stream, expected.stream
    told = f"status {answer.status} | {heard.message}"
    if heard.refused:
        return REFUSED, told
    if answer.status not in (0, 200):
        return WRONG, told
    if answer.ended == LATE:
        return WRONG, f"hung | after {said.texts}"
    if heard.whole and (said.texts, said.finished) == (wanted.texts, wanted.finished):
        return KEPT, ""
    right = all(wanted.texts.get(index, "").startswith(text) for index, text in said.texts.items())
    if heard.whole or not right:
        return WRONG, f"wrong tokens | {said.texts} {said.finished}, not {wanted.texts}"
    if heard.visibly_cut:
        return CUT, f"a stream was cut | {heard.message}"
    return WRONG, f"ended silently with text missing | after {said.texts}"


def judge(row: ChaosRow, heard: Heard, expected: Heard, *, may_cut: bool = False) -> None:
    """Counts what became of a request that may be refused; none may be wrong, and none cut that
    could survive."""
    result, reason = fate(heard, expected)
    row.kept += result == KEPT
    row.refused += result == REFUSED
    row.cut += result == CUT
    if result == CUT and not may_cut:
        row.broken.append(reason)
    elif result == WRONG:
        row.break_promise(reason)


def judge_streams(
    row: ChaosRow, heard: Sequence[Heard], expected: Sequence[Heard], *, may_cut: bool
) -> None:
    """The same for streams that were taken in: none of them may be refused."""
    for each, known in zip(heard, expected, strict=True):
        if each.refused:
            row.break_promise(fate(each, known)[1])
        else:
            judge(row, each, known, may_cut=may_cut)


def is_error(body: bytes, status: int) -> bool:
    """Whether a body says so in OpenAI's shape."""
    try:
        error = json.loads(body)["error"]
        return (
            set(error) == {"message", "type", "param", "code"}
            and isinstance(error["message"], str)
            and isinstance(error["param"], str | None)
            and isinstance(error["code"], str | None)
            and error["type"] == TYPES_AND_CODES[status][0]
        )
    except (ValueError, KeyError, TypeError):
        return False
