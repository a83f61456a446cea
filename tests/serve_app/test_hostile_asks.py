"""5,000 hostile schemas, grammars, tools and histories, four at a time, over HTTP: each is
answered, none by a fault of the server, in a second where it waits for no other, and nothing is
kept of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.support.hostile_grammars import HARMLESS, HOSTILE, random_schema
from tests.support.mock_server import HELLO
from tests.support.real_server import running_server
from tests.support.tool_chats import CALLED, CLOCK, RESULT, SHELL, WEATHER

ASKS, WARMING, AT_ONCE, ALONE = 5_000, 2_000, 4, 1_000
CACHE = ("--kv-cache-memory", "64MiB")  # full before memory is looked at: it grows as it fills
GROWTH_BYTES = 100e6
# One that comes alone, and 99 of 100 of four at once; grammars are compiled one after the other,
# for half a second each at most, so that the last of four may wait for three.
SECONDS, WAITING_SECONDS = 1.0, 4.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PIECES = (
    *("a", "[a-z]", ".", "\\d", "(", ")", "|", "*", "+", "?", "{3}", "{2,900}", "[^a]", "\\w"),
    *("(?=a)", "(?i)", "^", "$", "\\b", "é", "(.|\n)*", "[", "]", "\\", "&", "{0,}", "(a*)*"),
)
RULES = ("start", "s", "T", "U")
PARTS = (
    '"a"',
    '"é"',
    "/[a-z]+/",
    "/(a|b)*a(a|b){20}/",
    "%json {}",
    "<eos>",
    "(",
    ")",
    "|",
    "*",
    "?",
)


def hostile_ask(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body for it."""
    short = {"max_tokens": 3, "seed": chance.randrange(100)}
    kind = chance.choice(
        ["schema", "schema", "named", "regex", "lark", "tools", "tools", "history"]
    )
    if kind == "schema":
        form = {"name": "x", "schema": random_schema(chance), "strict": chance.random() < 0.5}
        text = {"type": "json_schema", **form}
        return chance.choice(
            [
                (
                    CHAT,
                    {
                        **short,
                        "messages": HELLO,
                        "response_format": {"type": "json_schema", "json_schema": form},
                    },
                ),
                (RESPONSES, {"input": "x", "max_output_tokens": 16, "text": {"format": text}}),
                (COMPLETIONS, {**short, "prompt": "x", "guided_json": form["schema"]}),
            ]
        )
    if kind == "named":
        grammar = chance.choice([*HOSTILE.values(), *HARMLESS.values()])
        # Another text each time: what came of one is remembered.
        if grammar.startswith("{"):
            [schema] = json.loads(grammar)["grammars"]
            named = {**schema["json_schema"], "title": str(chance.randrange(20))}
            return COMPLETIONS, {**short, "prompt": "x", "guided_json": named}
        grammar += " " * chance.randrange(20)
        return COMPLETIONS, {**short, "prompt": "x", "structured_outputs": {"grammar": grammar}}
    if kind == "regex":
        regex = "".join(chance.choices(PIECES, k=chance.randrange(1, 12)))
        return COMPLETIONS, {**short, "prompt": "x", "guided_regex": regex}
    if kind == "lark":
        lines = [
            f"{chance.choice(RULES)}: {' '.join(chance.choices([*RULES, *PARTS], k=5))}"
            for _ in range(chance.randrange(1, 5))
        ]
        return COMPLETIONS, {**short, "prompt": "x", "guided_grammar": "\n".join(lines)}
    return shaken_ask(chance, kind)


def shaken_ask(chance: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    """Tools and histories that made sense, parts of which were replaced by others."""
    short = {"max_tokens": 3, "seed": chance.randrange(100)}
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "é"}}
    told = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    wholes: list[tuple[str, dict[str, Any]]] = [
        (
            CHAT,
            {
                **short,
                "messages": [*HELLO, CALLED, RESULT],
                "tools": [WEATHER, CLOCK, SHELL],
                "tool_choice": chance.choice(["auto", "none", "required"]),
            },
        ),
        (
            RESPONSES,
            {
                "max_output_tokens": 16,
                "input": [{"role": "user", "content": "x"}, call, result],
                "tools": [{"type": "function", "name": "weather", "parameters": parameters}],
                "tool_choice": chance.choice(["auto", "none", "required"]),
            },
        ),
        (
            MESSAGES,
            {
                "max_tokens": 3,
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [told]},
                ],
                "tools": [{"name": "weather", "input_schema": parameters}],
                "tool_choice": {"type": chance.choice(["auto", "any", "none"])},
            },
        ),
    ]
    junk: list[Any] = [
        *(None, True, 0, -1.5, "", "x", "{}", "é" * 50, [], {}, [None], {"type": "object"}, "none"),
        *({"": {"": []}}, {"$ref": "#"}, ["a", 1], "\ud7ff", random_schema(chance)),
    ]
    rate = 0.03 if kind == "tools" else 0.08

    def shaken(value: Any) -> Any:
        if chance.random() < rate:
            return chance.choice(junk)
        if isinstance(value, dict):
            return {
                name: shaken(each) for name, each in value.items() if chance.random() > rate / 2
            }
        return [shaken(each) for each in value] if isinstance(value, list) else value

    path, body = chance.choice(wholes)
    limits = {name: body[name] for name in ("max_tokens", "max_output_tokens") if name in body}
    return path, {**{name: shaken(each) for name, each in body.items()}, **limits}


def resident(server: psutil.Process) -> int:
    """Bytes of a server's processes."""
    held = 0
    for process in (server, *server.children(recursive=True)):
        try:
            held += process.memory_info().rss
        except psutil.NoSuchProcess:  # a fork that compiled a grammar
            continue
    return held


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hostile_asks_are_answered_and_leave_nothing(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, *CACHE) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def ask(number: int) -> tuple[int, str, float]:
            path, body = hostile_ask(random.Random(number))
            began = monotonic()
            reply = client.post(path, content=json.dumps(body))
            took = monotonic() - began
            assert reply.status_code in (200, 400), (number, path, body, reply.text)
            return reply.status_code, path, took

        whole = psutil.Process(server.process.pid)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(ask, range(ASKS, ASKS + WARMING)))
            before = resident(whole)
            told = list(threads.map(ask, range(ASKS)))
        growth = resident(whole) - before
        alone = [ask(number)[2] for number in range(ASKS + WARMING, ASKS + WARMING + ALONE)]
        assert server.process.poll() is None
        assert client.get("/health").status_code == 200
        assert server.metric("lexshard_engine_restarts_total") == 0
    seconds = [took for _, _, took in told]
    counts = Counter((path, status) for status, path, _ in told)
    print(
        f"{ASKS} asks: {dict(counts)}; seconds: median {np.median(seconds):.3f}, 99% "
        f"{np.percentile(seconds, 99):.2f}, most {max(seconds):.2f}, "
        f"alone {max(alone):.2f}; grown by {growth / 1e6:.0f} MB"
    )
    assert max(alone) < SECONDS
    assert np.percentile(seconds, 99) < SECONDS
    assert max(seconds) < WAITING_SECONDS
    assert growth < GROWTH_BYTES
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        assert counts[path, 200] > 20, path
        assert counts[path, 400] > 20, path
