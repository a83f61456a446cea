"""Who is asked, and what has to be known of them before the load: the model, how long it can be,
and how many tokens its tokenizer makes of a word."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lexshard.loadtest.bench.load.plan import Wording
from lexshard.loadtest.client import once, refusal
from lexshard.loadtest.prompts import PromptWriter

_FEW_WORDS, _MANY_WORDS = 40, 140


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI endpoint by its address, without ``/v1``, and a name for the report."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an endpoint says of its model; ``max_tokens`` of prompt and answer, where it tells."""

    name: str
    max_tokens: int | None


def endpoint(text: str) -> Endpoint:
    """``URL`` or ``NAME=URL`` as a type of argument."""
    name, found, url = text.partition("=")
    if not found or "://" in name:
        name, url = "", text
    url = url.rstrip("/").removesuffix("/v1")
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give http://HOST:PORT or NAME=http://HOST:PORT"
        )
    return Endpoint(name or address.netloc, url)


def served_model(asked: Endpoint, name: str | None, key_variable: str | None) -> ServedModel:
    """The model of that name, or the first one.

    Raises:
        RuntimeError: the endpoint does not say what it serves, or not that.
    """
    listed = _talk(asked, "/v1/models", None, key_variable).get("data") or []
    for model in listed:
        if name is None or model.get("id") == name:
            return ServedModel(model["id"], model.get("max_model_len"))
    known = ", ".join(str(model.get("id")) for model in listed) or "nothing"
    raise RuntimeError(f"{asked.name} serves {known}, not {name or 'any model'}: give --model")


def tokens_per_word(asked: Endpoint, wording: Wording, key_variable: str | None) -> float:
    """Measured with a short and a long prompt of the kind that will be sent, so that what a chat
    template adds does not count.

    Raises:
        RuntimeError: the endpoint refuses them or does not count their tokens.
    """
    writer = PromptWriter(seed=0, tokens_per_word=1.0, block_tokens=1.0)
    counts = []
    for words in (_FEW_WORDS, _MANY_WORDS):
        body = wording.body(writer.write(0, words), 1)
        plain = {key: body[key] for key in body if key not in ("stream", "stream_options")}
        usage = _talk(asked, wording.path, plain, key_variable).get("usage") or {}
        counts.append(usage.get("prompt_tokens") or 0)
    if counts[1] <= counts[0]:
        raise RuntimeError(
            f"{asked.name} does not count prompt tokens (usage): cannot size prompts"
        )
    return (counts[1] - counts[0]) / (_MANY_WORDS - _FEW_WORDS)


def _talk(
    asked: Endpoint, path: str, body: dict[str, Any] | None, key_variable: str | None
) -> dict[str, Any]:
    key = os.environ[key_variable] if key_variable else None
    answer = asyncio.run(once(asked.url, path, body, key))
    if answer.fault:
        raise RuntimeError(f"{asked.name} does not answer at {asked.url}{path}: {answer.fault}")
    if answer.status != 200:
        raise RuntimeError(f"{asked.name} refuses {path}: {refusal(answer.status, answer.body)}")
    fields: Any = None
    with suppress(ValueError):
        fields = answer.json()
    if not isinstance(fields, dict):
        raise RuntimeError(f"{asked.name}: {path} is no OpenAI route")
    return fields
