"""`lexshard serve --samplers`: clients notice neither where tokens are decided nor who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.real_server import Server, running_server, wait

CONTROLS: dict[str, Any] = {
    "ignore_eos": True,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), "--samplers", "2") as running:
        yield running


def _tell(server: Server, seed: int, started: threading.Event | None = None) -> str:
    text = ""
    stream = server.client().completions.create(
        model="lexshard-demo",
        prompt="Once upon a time there was a little girl who",
        max_tokens=400,
        seed=seed,
        temperature=0.8,
        top_p=0.95,
        frequency_penalty=0.1,
        logprobs=2 if seed % 2 else None,
        stream=True,
        extra_body=CONTROLS,
    )
    for chunk in stream:
        text += chunk.choices[0].text
        if started is not None and len(text) > 100:
            started.set()
    return text


def _samplers() -> list[int]:
    """The process ids of all sampler processes of this machine."""
    found = subprocess.run(
        ["pgrep", "-f", "cluster.samplers.main"], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


def test_killed_samplers_are_replaced_and_no_stream_notices(server: Server) -> None:
    expected = [_tell(server, seed) for seed in range(4)]
    assert server.metric("lexshard_sampler_busy_seconds_total") > 0
    before = _samplers()
    assert len(before) >= 2
    events = [threading.Event() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(_tell, server, seed, event) for seed, event in enumerate(events)]
        for event in events:
            assert event.wait(60)
        os.kill(before[0], signal.SIGKILL)
        assert [each.result(120) for each in running] == expected
    assert server.metric("lexshard_samplers_lost_total") == 1
    assert server.metric("lexshard_engine_restarts_total") == 0
    wait(lambda: len(_samplers()) == len(before), 30, "the replacement")
    assert [_tell(server, seed) for seed in range(4)] == expected


def test_nothing_of_the_samplers_outlives_the_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    others = set(_samplers())
    segments = set(os.listdir("/dev/shm"))
    with running_server(tmp_path_factory.mktemp("short"), "--samplers", "1") as running:
        assert _tell(running, 3)
        assert set(_samplers()) - others
    wait(lambda: not set(_samplers()) - others, 10, "the samplers to end")
    left = {name for name in set(os.listdir("/dev/shm")) - segments if "lexshard" in name}
    assert not left
