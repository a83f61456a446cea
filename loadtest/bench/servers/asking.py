"""One completion at a time, whose prompts are equally long and all different."""

from __future__ import annotations

import asyncio
from typing import Any

from lexshard.loadtest.bench.servers.endpoint import Endpoint, served_model
from lexshard.loadtest.client import Client, HttpAnswer, StreamedAnswer, fault_of, once, refusal
from lexshard.loadtest.prompts import PromptWriter

PATH = "/v1/completions"
PROMPT_WORDS = 40


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
