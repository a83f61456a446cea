"""What one client's requests do to another's stream: the longest wait for its next token, and what
the server's processes hold meanwhile.

Every request here is one that the server may take: as large, with as many choices and as dear
controls as it allows. Most of what is refused is in ``fuzz``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from lexshard.loadtest.chaos.afterwards import expect_idle
from lexshard.loadtest.chaos.growth import MEBIBYTE
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.server import ServerUnderTest
from lexshard.loadtest.event_stream import EventReader
from lexshard.loadtest.raw_stream import opened_stream

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
    short = {"prompt": ids[:20], "n": MOST_CHOICES, "max_tokens": 60, "ignore_eos": True}
    bias = {str(token): 1.0 for token in chance.sample(range(VOCABULARY), 1024)}
    dear = {
        **short,
        "stream": True,
        "temperature": 1.5,
        "top_p": 0.95,
        "min_p": 1e-9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": bias,
        "bad_words": phrases,
        "allowed_token_ids": list(range(0, VOCABULARY, 2)),
        "min_tokens": 30,
        "stop": ["x" * 1024, "y" * 1024, "z" * 1024, "q" * 1024],
        "stop_token_ids": list(range(1024)),
        "certificate": True,
        "draft": True,
        "return_token_ids": True,
    }
    megabytes = "once upon a time " * 920_000
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    return {
        "many ids, left at once": Neighbour(
            COMPLETIONS,
            {**short, "n": 128, "allowed_token_ids": list(range(VOCABULARY))},
            times=10,
            leaves=True,
        ),
        "many ids": Neighbour(
            COMPLETIONS, {**short, "allowed_token_ids": list(range(0, VOCABULARY, 2))}
        ),
        "phrases": Neighbour(COMPLETIONS, {**short, "bad_words": words}),
        "phrases in the text": Neighbour(
            COMPLETIONS, {**short, "prompt": "the " * 30, "bad_words": phrases}
        ),
        "log-probabilities": Neighbour(COMPLETIONS, {**short, "logprobs": 20, "stream": True}),
        "scores of a prompt": Neighbour(
            COMPLETIONS,
            # As many as are taken.
            {**short, "n": 12, "prompt": ids, "prompt_logprobs": 20, "max_tokens": 1},
        ),
        "scores of many prompts": Neighbour(
            COMPLETIONS,
            {
                "prompt": [[index, *ids[:1000]] for index in range(1, 60)],
                "echo": True,
                "logprobs": 7,
                "max_tokens": 1,
            },
        ),
        "long prompts": Neighbour(
            COMPLETIONS,
            {"prompt": [[index, *ids] for index in range(1, 60)], "max_tokens": 1},
        ),
        "almost everything": Neighbour(COMPLETIONS, dear),
        "everything": Neighbour(COMPLETIONS, {**dear, "logprobs": 20}),
        "hot and wide": Neighbour(
            COMPLETIONS, {**short, "temperature": 100, "top_p": 0.999999, "stream": True}
        ),
        "text to be cut": Neighbour(
            COMPLETIONS,
            {"prompt": megabytes, "truncate_prompt_tokens": 10, "max_tokens": 1},
            times=2,
        ),
        "one long word": Neighbour(
            COMPLETIONS,
            {"prompt": "a" * 15_000_000, "truncate_prompt_tokens": 10, "max_tokens": 1},
            times=2,
        ),
        "a long conversation": Neighbour(
            CHAT, {"messages": messages * 8000, "max_tokens": 1}, times=4
        ),
        "ids to be read": Neighbour("/detokenize", {"tokens": ids * 500}, times=4),
        "text to be counted": Neighbour("/tokenize", {"prompt": megabytes}, times=2),
        "250 tiny requests": Neighbour(
            COMPLETIONS, {"prompt": [1], "max_tokens": 1, "n": 1}, times=250
        ),
    }


async def run_neighbours(server: ServerUnderTest, report: ChaosReport, *, quick: bool) -> None:
    """Every kind beside a stream of its own; the five worst at the end."""
    kinds = neighbours(random.Random(report.seed))
    rows = []
    for name, neighbour in kinds.items():
        row = await asyncio.to_thread(_beside, server, name, neighbour, quick)
        await expect_idle(server, row)
        report.add(row)
        rows.append(row)
    worst = sorted(rows, key=lambda row: row.slowest or 0.0, reverse=True)[:5]
    told = ", ".join(f"{row.case} {1000 * (row.slowest or 0.0):.0f} ms" for row in worst)
    report.add(ChaosRow(PART, "the five worst", note=told))


def _beside(server: ServerUnderTest, name: str, neighbour: Neighbour, quick: bool) -> ChaosRow:
    repeats = QUICK_REPEATS if quick else REPEATS
    row = ChaosRow(PART, name, requests=neighbour.times * repeats)
    body = json.dumps(neighbour.body).encode()
    alone: list[float] = []
    beside: list[float] = []
    growth = 0
    for _ in range(repeats):
        with _Stream(server.url) as stream:
            stream.listen(until=lambda: False, seconds=ALONE_SECONDS)
            alone += stream.gaps()
            stream.forget()
            held = _memory(server)
            senders = _Senders(server.url, neighbour, body)
            watch = _MemoryWatch(server)
            stream.listen(until=senders.done, seconds=BESIDE_SECONDS)
            growth = max(growth, watch.most() - held)
            beside += stream.gaps()
            senders.join()
        for status in senders.statuses:
            row.kept += status == 200
            row.refused += 400 <= status < 500 or status == 503
            row.cut += status == 0
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


class _Stream:
    """A stream of tokens, and when they come; another one follows where it ends."""

    def __init__(self, url: str) -> None:
        self._url = url + COMPLETIONS
        self._times: list[float] = []
        self._open = ExitStack()
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> _Stream:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _begin(self) -> None:
        body = json.dumps(STREAM).encode()
        _, self._pieces = self._open.enter_context(opened_stream(self._url, body, {}, 60.0))
        self._events = EventReader()

    def listen(self, until: Callable[[], bool], seconds: float) -> None:
        """Until it is so, but no longer than so many seconds."""
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            piece = next(self._pieces, b"")
            if not piece:  # a gap that is nobody's fault
                self._open.close()
                self._begin()
                self._times.append(float("nan"))
                continue
            if self._events.feed(piece):
                self._times.append(time.monotonic())

    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        pairs = zip(self._times, self._times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > earlier]

    def forget(self) -> None:
        self._times = self._times[-1:]


class _Senders:
    """A process whose threads send one request each, and hear its answer out or leave: in this one
    they would hold up whoever looks at the clock."""

    def __init__(self, url: str, neighbour: Neighbour, body: bytes) -> None:
        self.statuses: list[int] = []
        context = multiprocessing.get_context("fork")
        self._left = context.Event()
        self._told = context.SimpleQueue()
        self._ended = 0.0
        self._process = context.Process(target=self._send_all, args=(url, neighbour, body))
        self._process.start()

    def _send_all(self, url: str, neighbour: Neighbour, body: bytes) -> None:
        arguments = (url + neighbour.path, neighbour, body)
        threads = [
            threading.Thread(target=self._send, args=arguments) for _ in range(neighbour.times)
        ]
        for thread in threads:
            thread.start()
            if neighbour.leaves:  # whose places the next one then takes
                thread.join()
        for thread in threads:
            thread.join()

    def _send(self, url: str, neighbour: Neighbour, body: bytes) -> None:
        seconds = LEAVING_SECONDS if neighbour.leaves else 2 * BESIDE_SECONDS
        status = 0
        try:
            with opened_stream(url, body, {}, seconds) as (status, pieces):
                for _ in pieces:
                    if self._left.is_set():
                        break
        except (OSError, http.client.HTTPException):
            status = 0
        self._told.put(status)

    def done(self) -> bool:
        """Whether all have been answered, for a moment."""
        if self._process.is_alive():
            return False
        self._ended = self._ended or time.monotonic()
        return time.monotonic() - self._ended > ALONE_SECONDS

    def join(self) -> None:
        """Those that are still heard are left."""
        self._left.set()
        self._process.join()
        while not self._told.empty():
            self.statuses.append(self._told.get())


class _MemoryWatch:
    """The most that the processes of a server have held together, looked at now and then."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self._most = max(self._most, _memory(self._server))

    def most(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most


def _memory(server: ServerUnderTest) -> int:
    """Resident bytes of all processes."""
    held = 0
    for process in server.tree():
        try:
            held += process.memory_info().rss
        except psutil.Error:
            continue
    return held
