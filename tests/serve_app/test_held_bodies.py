"""What of a request is in memory while its reply is made: nothing that is read no more."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from tests.support.mock_engine import MockEngine, Script
from tests.support.mock_server import HELLO, Client, serve, until

MARK = "the_mark"
MARKED = "put here what has the mark"  # only decoded bodies have it
SAID = {"type": "output_text", "text": "Yes", "annotations": [MARKED]}
ITEMS = {"input": [{"role": "assistant", "content": [SAID]}, *HELLO]}
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 5}


def is_held() -> bool:
    gc.collect()
    return any(MARK in each for each in gc.get_objects() if type(each) is dict)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "metadata": MARKED}),
        ("/v1/chat/completions", {**CHAT, "prompt_cache_options": MARKED}),
        ("/v1/chat/completions", {**CHAT, "guided_json": {"const": MARKED}}),
        ("/v1/completions", {"prompt": "Hi", "user": MARKED}),
        ("/v1/responses", {"input": "Hi", "prompt_cache_options": MARKED}),
        ("/v1/responses", ITEMS),
        ("/v1/responses", {**ITEMS, "store": False}),
        ("/v1/messages", {**CHAT, "metadata": MARKED}),
    ],
)
def test_what_nothing_reads_any_more_is_not_held_while_a_reply_is_made(
    path: str, body: dict[str, Any]
) -> None:
    """Decoded, five megabytes of it were 64."""
    engine = MockEngine(script=lambda _: Script([(97,)], hangs=True))
    content = json.dumps(body).replace(json.dumps(MARKED), json.dumps({MARK: [1]}))
    assert MARK in content

    async def test(client: Client) -> None:
        asking = asyncio.create_task(client.post(path, content=content))
        await until(lambda: bool(engine.requests))
        held = is_held()
        asking.cancel()
        assert not held

    serve(test, engine)
