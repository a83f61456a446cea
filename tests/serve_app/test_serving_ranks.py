"""`lexshard serve --tensor-parallel`: clients notice neither ranks nor who dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.backends import PROCESS_AND_RAY, Backend
from tests.support.rank_digests import seconds_to_be_back
from tests.support.real_server import Server, running_server

pytestmark = pytest.mark.slow

STREAMS = 24

# A stream's text, and what it says of each token.
Told = tuple[str, list[object]]


def tell(server: Server, seed: int, began: threading.Event) -> tuple[Told, float]:
    """What a stream tells, and the longest time between two pieces, which may hold many tokens."""
    text, tokens = "", list[object]()
    longest, before = 0.0, time.monotonic()
    stream = server.client().completions.create(
        model="lexshard-demo",
        prompt="Once upon a time there was a little girl who",
        max_tokens=300,
        seed=seed,
        temperature=0.8,
        logprobs=2 if seed % 4 == 0 else None,
        stream=True,
        extra_body={"top_k": 50 if seed % 3 else -1, "ignore_eos": True},
    )
    for chunk in stream:
        now = time.monotonic()
        longest, before = max(longest, now - before), now
        text += chunk.choices[0].text
        if (own := chunk.choices[0].logprobs) is not None:
            parts = own.text_offset, own.tokens, own.token_logprobs, own.top_logprobs
            tokens.extend(zip(*map(list, filter(None, parts)), strict=True))
        began.set()
    return (text, tokens), longest


def texts(server: Server, lose: Callable[[], None] | None = None) -> tuple[list[Told], float]:
    began = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(tell, server, seed, each) for seed, each in enumerate(began)]
        if lose is not None:
            for each in began:
                assert each.wait(60)
            lose()
        told = [each.result(240) for each in running]
    return [each for each, _ in told], max(seconds for _, seconds in told)


def rank(server: Server) -> int:
    """The process of the last rank."""
    roles = httpx.get(f"{server.url}/status").json()["roles"]
    return int([role["process_id"] for role in roles if role["role"] == "body"][-1])


@pytest.mark.parametrize("shards", ["1", "2"])
@pytest.mark.parametrize("backend", PROCESS_AND_RAY)
def test_a_lost_rank_makes_streams_wait_and_changes_no_text(
    tmp_path: Path, backend: Backend, shards: str
) -> None:
    flags = "--tensor-parallel", "2", "--shards", shards
    with running_server(tmp_path, *flags, backend=backend) as server:
        expected, _ = texts(server)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            lost = rank(server)

            def lose(lost: int = lost, number: signal.Signals = number) -> None:
                os.kill(lost, number)

            found, longest = texts(server, lose)
            print(f"{backend}, {number.name}: {longest:.1f} s at the most between two tokens")
            assert found == expected
            assert longest < seconds_to_be_back()
            assert rank(server) != lost
        assert server.metric("lexshard_engine_restarts_total") == 0
