"""What one client's requests do to another's stream: the longest wait for its next token, and what
the server's processes hold meanwhile.

Every request here is one that the server may take: as large, with as many choices and as dear
controls as it allows. Most of what is refused is in ``fuzz``.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from statistics import median
from typing import Any

from lexshard.loadtest.bench.servers.running import RunningServer
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.watch import MEBIBYTE, expect_idle, memory
from lexshard.loadtest.client import Client, StreamedAnswer

PART = "neighbours"
LONGEST_GAP_SECONDS = 0.25
MOST_GROWTH = 512 * MEBIBYTE
ALONE_SECONDS, BESIDE_SECONDS = 0.7, 20.0
LEAVING_SECONDS = 0.1
REPEATS, QUICK_REPEATS = 3, 1
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCABULARY = 16_000  # of the demo, whose ids these are
MOST_CHOICES = 63  # beside a stream in 64 places
STREAM = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """``times`` the same request at once; or one after the other, and its client ``leaves`` as soon
    as it is sent."""

    path: str
    body: dict[str, Any]
    times: int = 1
    leaves: bool = False


def neighbours(chance: random.Random) -> dict[str, Neighbour]:
    """The dearest requests of every kind, by name."""
    ids = [chance.randrange(1, VOCABULARY) for _ in range(1900)]
    words = [f"w{index} {chance.randrange(1000)}" for index in range(1024)]
    phrases = [f"the {index}"[:16] for index in range(1024)]
    bias = {str(token): 1.0 for token in chance.sample(range(VOCABULARY), 1024)}
    every, half = list(range(VOCABULARY)), list(range(0, VOCABULARY, 2))
    megabytes = "once upon a time " * 920_000
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    short = {"prompt": ids[:20], "n": MOST_CHOICES, "max_tokens": 60, "ignore_eos": True}
    penalties = ("frequency_penalty", "presence_penalty")
    switches = ("stream", "certificate", "draft", "return_token_ids")
    dear: dict[str, Any] = (
        short
        | dict.fromkeys(penalties, 0.5)
        | dict.fromkeys(switches, True)
        | {"temperature": 1.5, "top_p": 0.95, "min_p": 1e-9, "repetition_penalty": 1.2}
        | {"logit_bias": bias, "bad_words": phrases, "allowed_token_ids": half, "min_tokens": 30}
        | {"stop": [letter * 1024 for letter in "xyzq"], "stop_token_ids": list(range(1024))}
    )
    cut = {"truncate_prompt_tokens": 10, "max_tokens": 1}
    scored = [[index, *ids[:1000]] for index in range(1, 60)]
    one = {"max_tokens": 1}

    def short_and(**fields: Any) -> Neighbour:
        return Neighbour(COMPLETIONS, {**short, **fields})

    return {
        "many ids, left at once": replace(
            short_and(n=128, allowed_token_ids=every), times=10, leaves=True
        ),
        "many ids": short_and(allowed_token_ids=half),
        "phrases": short_and(bad_words=words),
        "phrases in the text": short_and(prompt="the " * 30, bad_words=phrases),
        "log-probabilities": short_and(logprobs=20, stream=True),
        "scores of many prompts": Neighbour(
            COMPLETIONS, {**one, "prompt": scored, "echo": True, "logprobs": 7}
        ),
        "long prompts": Neighbour(
            COMPLETIONS, {**one, "prompt": [[index, *ids] for index in range(1, 60)]}
        ),
        "almost everything": Neighbour(COMPLETIONS, dear),
        "everything": Neighbour(COMPLETIONS, {**dear, "logprobs": 20}),
        "hot and wide": short_and(temperature=100, top_p=0.999999, stream=True),
        "text to be cut": Neighbour(COMPLETIONS, {**cut, "prompt": megabytes}, times=2),
        "one long word": Neighbour(COMPLETIONS, {**cut, "prompt": "a" * 15_000_000}, times=2),
        "a long conversation": Neighbour(CHAT, {**one, "messages": turns * 8000}, times=4),
        "ids to be read": Neighbour("/detokenize", {"tokens": ids * 500}, times=4),
        "text to be counted": Neighbour("/tokenize", {"prompt": megabytes}, times=2),
        "250 tiny requests": Neighbour(COMPLETIONS, {**one, "prompt": [1], "n": 1}, times=250),
    }


async def run_neighbours(server: RunningServer, report: ChaosReport, *, quick: bool) -> None:
    """Every kind beside a stream of its own; the five worst at the end."""
    rows = []
    for name, neighbour in neighbours(random.Random(report.seed)).items():
        row = await _beside(server, name, neighbour, QUICK_REPEATS if quick else REPEATS)
        await expect_idle(server, row)
        report.add(row)
        rows.append(row)
    worst = sorted(rows, key=lambda row: row.slowest or 0.0, reverse=True)[:5]
    told = ", ".join(f"{row.case} {1000 * (row.slowest or 0.0):.0f} ms" for row in worst)
    report.add(ChaosRow(PART, "the five worst", note=told))


async def _beside(server: RunningServer, name: str, neighbour: Neighbour, repeats: int) -> ChaosRow:
    row = ChaosRow(PART, name, requests=neighbour.times * repeats)
    body = json.dumps(neighbour.body).encode()
    alone: list[float] = []
    beside: list[float] = []
    growth = 0
    for _ in range(repeats):
        clock = TokenClock()
        listening = asyncio.create_task(clock.listen(server.url))
        began = time.perf_counter()
        await asyncio.sleep(ALONE_SECONDS)
        sent = time.perf_counter()
        alone += clock.gaps(began)
        held = most = await asyncio.to_thread(memory, server)
        # In a process of its own: in this one it would hold up what looks at the clock.
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            sending = pool.submit(_send, server.url, neighbour, body)
            while not sending.done():
                await asyncio.sleep(0.1)
                most = max(most, await asyncio.to_thread(memory, server))
        await asyncio.sleep(ALONE_SECONDS)
        beside += clock.gaps(sent)
        growth = max(growth, most - held)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        for status in sending.result():
            row.count(status)
            row.wrong += status == 500
    row.slowest = max(beside, default=float("inf"))
    row.note = (
        f"{len(body):,} bytes; next token {1000 * median(alone):.1f} ms alone, "
        f"{1000 * median(beside):.1f} beside it, at most {1000 * row.slowest:.0f}; "
        f"{growth / MEBIBYTE:+.0f} MiB"
    )
    row.expect(row.slowest <= LONGEST_GAP_SECONDS, f"a stream waited {row.slowest:.2f} s")
    row.expect(growth <= MOST_GROWTH, f"the server grew by {growth / MEBIBYTE:.0f} MiB")
    row.expect(not row.wrong, f"{row.wrong} answers with status 500")
    return row


class TokenClock:
    """When the tokens of a stream come; another one follows where it ends."""

    def __init__(self) -> None:
        self._streams: list[StreamedAnswer] = []

    async def listen(self, url: str) -> None:
        """Until it is cancelled."""
        client = Client(url, keep=False)
        while True:
            self._streams.append(StreamedAnswer())
            await client.post(COMPLETIONS, STREAM, self._streams[-1])

    def gaps(self, since: float) -> list[float]:
        """Seconds between tokens of one stream that end after ``since``, the one that is waited for
        included."""
        moments = [each.pieces for each in self._streams]
        moments[-1] = [*moments[-1], time.perf_counter()]
        return [b - a for pieces in moments for a, b in pairwise(pieces) if b >= since]


def _send(url: str, neighbour: Neighbour, body: bytes) -> list[int]:
    """The statuses of a neighbour's requests, 0 where there was no answer in time."""
    client = Client(
        url, seconds=LEAVING_SECONDS if neighbour.leaves else BESIDE_SECONDS, keep=False
    )

    async def sent() -> list[int]:
        # One after the other, where they leave: the next takes the places of the one before.
        at_once = asyncio.Semaphore(1 if neighbour.leaves else neighbour.times)

        async def one() -> int:
            async with at_once:
                return (await client.post(neighbour.path, body)).status

        return await asyncio.gather(*(one() for _ in range(neighbour.times)))

    return asyncio.run(sent())
