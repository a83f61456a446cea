"""Hostile bodies that are large, or ask for a lot of work in few bytes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from lexshard.loadtest.chaos.hostile.bodies import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATING,
    LARGE_SECONDS,
    TOKENIZE,
    encoded,
    post,
    valid_body,
)
from lexshard.loadtest.chaos.hostile.exchange import HostileRequest

LETTERS = ("a", " ", "\n", "1", "ab ", "word ", "\u00e9", "\u4e16", "\U0001f4a5", "e\u0301", "\x00")


def many_keys(chance: random.Random) -> HostileRequest:
    """An object with up to a million keys, as the body or in it."""
    path = chance.choice((COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE))
    count = chance.choice((10_000, 200_000, 1_000_000))
    where = chance.choice(
        ("", "logit_bias", "metadata", "chat_template_kwargs", "stream_options", "prompt")
    )
    letter = "" if where == "logit_bias" else "k"
    keys = ",".join(f'"{letter}{index}":1' for index in range(count))
    body = valid_body(chance, path)
    if not where:
        text = json.dumps(body)[:-1] + "," + keys + "}"
    else:
        body[where] = "@"
        text = json.dumps(body).replace('"@"', "{" + keys + "}")
    return replace(post(path, text.encode()), patience=LARGE_SECONDS)


def giant_prompts(chance: random.Random) -> HostileRequest:
    """Megabytes of text or ids, to be cut to what fits or not."""
    path = chance.choice((COMPLETIONS, COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE))
    size = chance.choice((100_000, 1_000_000, 5_000_000, 15_000_000))
    letters = chance.choice(LETTERS)
    text = letters * (size // len(json.dumps(letters)[1:-1]))
    body = valid_body(chance, path)
    kind = chance.choice(("text", "text", "ids", "texts"))
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    elif path == DETOKENIZE:
        body["tokens"] = [chance.randrange(16_000)] * (size // 7)
    elif path == COMPLETIONS and kind == "ids":
        body["prompt"] = [chance.randrange(16_000)] * (size // 7)
    elif path == COMPLETIONS and kind == "texts":
        body["prompt"] = [text[: size // 200]] * 200
    else:
        body["prompt"] = text
    if path in GENERATING and (keep := chance.choice((None, -1, 1, 100, 2000))) is not None:
        body["truncate_prompt_tokens"] = keep
    return replace(encoded(chance, path, body), patience=LARGE_SECONDS)


def odd_sampling(chance: random.Random) -> HostileRequest:
    """Fields of the right types with values at and beyond their ends, several at a time."""
    path = chance.choice(GENERATING)
    ends: dict[str, tuple[Any, ...]] = {
        "temperature": (0, 1e-300, 1e-5, 100, 100.1, -0.1),
        "top_k": (-1, 0, 1, 2**31 - 1, 2**31),
        "top_p": (0, 1e-300, 1, 1.0000001),
        "min_p": (0, 1e-300, 1, 2),
        "repetition_penalty": (0.01, 100, 0, 1),
        "presence_penalty": (-2, 2, 2.1),
        "frequency_penalty": (-2, 2, -2.1),
        "seed": (-(2**63), 2**63 - 1, 2**63, 0),
        "n": (1, 128, 129, 0),
        "max_tokens": (1, 2, 0),
        "min_tokens": (0, 2, 2000, 2**40),
        "logit_bias": (
            {str(index): -100 for index in range(1024)},
            {str(index): 100 for index in range(1025)},
            {"16383": 100},
            {"16384": 1},
        ),
        "allowed_token_ids": ([0], [16_383], [16_384], list(range(16_384)), [0] * 5000),
        "bad_words": (["a"] * 1024, [" "], ["a" * 1024], ["x" * 1024] * 16, ["the", " the"]),
        "stop": ("a", ["a", "b", "c", "d"], ["a"] * 5, "x" * 1024, "x" * 1025),
        "stop_token_ids": ([0], [16_383] * 1024, [16_384], list(range(1024))),
        "logprobs": (0, 20, 21, True, False),
        "top_logprobs": (0, 20, 21),
        "prompt_logprobs": (0, 20, 21, -1),
        "truncate_prompt_tokens": (-1, 0, 1, 2**62),
        "echo": (True, False),
        "stream": (True, False),
        "ignore_eos": (True, False),
        "certificate": (True, False),
        "return_token_ids": (True, False),
        "priority": (-(2**31), 2**31 - 1, 2**31),
    }
    body = valid_body(chance, path)
    for name in chance.sample(sorted(ends), chance.randrange(1, 6)):
        body[name] = chance.choice(ends[name])
    return encoded(chance, path, body)


def odd_conversations(chance: random.Random) -> HostileRequest:
    """Messages and template arguments as no client sends them."""
    path = chance.choice((CHAT, TOKENIZE))
    roles = ("user", "system", "assistant", "developer", "tool", "function", "", None, 1, ["user"])
    odd = chance.random() < 0.6  # else only the contents are
    contents: tuple[Any, ...] = (
        *("Hi", "", None, 1, [], {}, "{{ 7 * 7 }}", "{% for x in range(10**9) %}{% endfor %}"),
        *([{"type": "text", "text": "a"}], [{"type": "image_url", "image_url": {"url": "a"}}]),
        *([{"type": "text"}], [{"type": "text", "text": 1}], ["a"], "<|endoftext|>" * 50),
    )
    messages = [
        {
            "role": chance.choice(roles) if odd else "user",
            "content": chance.choice(contents if odd else ("Hi", "", *contents[6:9])),
        }
        for _ in range(chance.choice((1, 2, 5, 1000)))
    ]
    if chance.random() < 0.3:
        messages[0][chance.choice(("tool_calls", "name", "refusal", "audio", "x"))] = [1]
    body: dict[str, Any] = {"messages": messages}
    if path == CHAT:
        body["max_tokens"] = 2
    names = (
        "messages",
        "tokenize",
        "chat_template",
        "x",
        "bos_token",
        "__class__",
        "range",
        "self",
    )
    body["chat_template_kwargs"] = {
        chance.choice(names): chance.choice((1, "a", None, [], {"a": 1}, 10**9))
        for _ in range(chance.choice((0, 1, 3)))
    }
    for name in ("add_generation_prompt", "continue_final_message"):
        if chance.random() < 0.3:
            body[name] = chance.random() < 0.5
    return encoded(chance, path, body)
