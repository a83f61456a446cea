"""One completion at a time, whose prompts are equally long and all different."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from lexshard.loadtest.bench.servers.endpoint import Endpoint, served_model
from lexshard.loadtest.bench.servers.running import RunningServer
from lexshard.loadtest.client import Client, HttpAnswer, StreamedAnswer, fault_of, once, refusal
from lexshard.loadtest.prompts import PromptWriter

PATH = "/v1/completions"
PROMPT_WORDS = 40
KILLED_TOKENS, PIECES_BEFORE, TEMPERATURE = 400, 20, 0.8


class Asker:
    """Asks a server for completions. No two prompts are alike, so that none is found in a cache;
    the same ``seed`` asks the same. Raises RuntimeError where the server refuses."""

    def __init__(self, url: str, seed: int) -> None:
        self.model = served_model(Endpoint("the server", url), None, None).name
        self._url = url
        self._writer = PromptWriter(seed, tokens_per_word=1.0, block_tokens=1.0)
        self._asked = 0

    def body(self, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The next request."""
        self._asked += 1
        prompt = self._writer.write(self._asked, PROMPT_WORDS)
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        return {**asked, "temperature": 0, "ignore_eos": True, "stream": True, **fields}

    def hear(self, body: dict[str, Any], stream: StreamedAnswer) -> HttpAnswer:
        """The whole answer to a streamed request, which ``stream`` hears piece by piece.

        Raises RuntimeError where the server refuses, or the answer is not whole.
        """
        client = Client(self._url, keep=False)
        answer = asyncio.run(client.post(PATH, body, stream))
        if fault := fault_of(answer, stream):
            raise RuntimeError(fault)
        return answer

    def first_token_seconds(self, max_tokens: int = 4) -> float:
        """From a question, its connection included, to the first text; the answer is heard out."""
        stream = StreamedAnswer()
        answer = self.hear(self.body(max_tokens), stream)
        if not stream.pieces:
            raise RuntimeError("an answer without text")
        return stream.pieces[0] - answer.began

    def one_token(self) -> None:
        """Returns when the answer of one token is there, which need not be text."""
        answer = asyncio.run(once(self._url, PATH, self.body(1, stream=False)))
        if answer.status != 200:
            raise RuntimeError(answer.fault or refusal(answer.status, answer.body))


# -- a stream under which the engine dies ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KilledStream:
    """``seconds`` from the kill until the stream went on. ``same``: its text is that of the same
    request on the undisturbed server."""

    seconds: float
    same: bool


class _Killer(StreamedAnswer):
    """Hears a stream, and kills a process after its first pieces."""

    def __init__(self, victim: psutil.Process) -> None:
        super().__init__()
        self._victim = victim
        self.killed = math.inf

    def feed(self, data: bytes, now: float) -> None:
        super().feed(data, now)
        if self.killed == math.inf and len(self.pieces) >= PIECES_BEFORE:
            self._victim.kill()
            self.killed = time.perf_counter()


def kill_under_stream(server: RunningServer, asker: Asker, seed: int) -> KilledStream:
    """Kills the engine's process under the one stream of a server that does nothing else.

    Raises RuntimeError where there is no engine, or the stream is refused or ends too early.
    """
    body = asker.body(KILLED_TOKENS, seed=seed, temperature=TEMPERATURE)
    undisturbed, stream = StreamedAnswer(), _Killer(server.find("engine"))
    asker.hear(body, undisturbed)
    asker.hear(body, stream)
    after = [each for each in stream.pieces if each > stream.killed]
    if not after:
        raise RuntimeError(f"a stream of {KILLED_TOKENS} tokens had ended before its engine died")
    return KilledStream(silence_after(stream.killed, after), stream.texts == undisturbed.texts)


def silence_after(killed: float, moments: Sequence[float]) -> float:
    """Seconds from the kill to the end of the longest silence after it: what the engine had sent
    before it died may come a little later."""
    gaps = [
        (now - before, now) for before, now in zip([killed, *moments[:-1]], moments, strict=True)
    ]
    return max(gaps)[1] - killed
