"""`lexshard serve --samplers`: clients notice neither where tokens are decided nor who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_server import Server, running_server, wait

CONTROLS: dict[str, Any] = {
    "ignore_eos": True,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
}


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
        ["pgrep", "-f", "lexshard.cluster.samplers.main"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in found.stdout.split()]


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "lexshard" in name}


@pytest.mark.slow
def test_killed_samplers_are_replaced_and_no_stream_notices(tmp_path: Path) -> None:
    """And nothing of samplers, killed or not, outlives the server."""
    others, segments = set(_samplers()), _shared_memory()
    with running_server(tmp_path, "--samplers", "2") as server:
        _lose_a_sampler(server)
    wait(lambda: not set(_samplers()) - others, 10, "the samplers to end")
    assert not _shared_memory() - segments


def _lose_a_sampler(server: Server) -> None:
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
