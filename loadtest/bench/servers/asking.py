"""One streamed completion at a time, each piece of text with the moment it came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import orjson

from lexshard.loadtest.bench.serve.endpoint import Endpoint, served_model
from lexshard.loadtest.event_stream import DONE, EventReader, StreamedAnswer, refusal
from lexshard.loadtest.prompts import PromptWriter
from lexshard.loadtest.raw_stream import opened_stream

PATH = "/v1/completions"
PROMPT_WORDS = 40
SILENCE_SECONDS = 300.0  # the longest that a stream may pause


class Asker:
    """Asks a server for completions. Prompts are equally long and no two of them are alike, so
    that none is found in a cache; the same ``seed`` asks the same."""

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

    def follow(self, body: dict[str, Any]) -> Iterator[tuple[float, str]]:
        """Each piece of text of a streamed completion with the moment it came, in seconds of
        ``time.perf_counter``.

        Raises:
            RuntimeError: the server refuses, or the answer is not whole.
        """
        reader, answer = EventReader(), StreamedAnswer()
        data = json.dumps(body).encode()
        with opened_stream(self._url + PATH, data, {}, SILENCE_SECONDS) as (status, pieces):
            if status != 200:
                raise RuntimeError(refusal(status, b"".join(pieces)))
            for piece in pieces:
                now = time.perf_counter()
                answer.feed(piece, now)
                if text := "".join(map(_text, reader.feed(piece))):
                    yield now, text
        if answer.fault:
            raise RuntimeError(answer.fault)

    def first_token_seconds(self, max_tokens: int = 4) -> float:
        """From a question, its connection included, to the first text; the answer is heard out.

        Raises:
            RuntimeError: as above, or there is no text.
        """
        asked = time.perf_counter()
        moments = [now for now, _ in self.follow(self.body(max_tokens))]
        if not moments:
            raise RuntimeError("an answer without text")
        return moments[0] - asked

    def one_token(self) -> None:
        """Returns when the answer of one token is there, which need not be text.

        Raises:
            RuntimeError: the server refuses.
        """
        data = json.dumps(self.body(1, stream=False)).encode()
        with opened_stream(self._url + PATH, data, {}, SILENCE_SECONDS) as (status, pieces):
            content = b"".join(pieces)
        if status != 200:
            raise RuntimeError(refusal(status, content))


def _text(event: bytes) -> str:
    if event == DONE:
        return ""
    choices = orjson.loads(event).get("choices") or ()
    return "".join(choice.get("text") or "" for choice in choices)
