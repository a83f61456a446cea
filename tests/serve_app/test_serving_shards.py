"""`lexshard serve --shards`: clients notice neither where rows are nor who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.paths import DEMO_DRAFT, ROOT
from tests.support.real_server import Server, running_server, wait

pytestmark = pytest.mark.slow

FLAGS = ("--draft", str(DEMO_DRAFT), "--sampler-placement", "ray")


def _tell(server: Server, seed: int, started: threading.Event | None = None) -> str:
    text = ""
    stream = server.client().completions.create(
        model="lexshard-demo",
        prompt="Once upon a time there was a little girl who",
        max_tokens=400,
        seed=seed,
        temperature=0.8,
        top_p=1.0 if seed % 2 else 0.95,
        frequency_penalty=0.1,
        stream=True,
        extra_body={"ignore_eos": True, "top_k": 50 if seed % 3 else -1},
    )
    for chunk in stream:
        text += chunk.choices[0].text
        if started is not None and len(text) > 100:
            started.set()
    return text


def _shards(server: Server) -> list[int]:
    """The processes of the shards that are not the engine's own."""
    roles = httpx.get(f"{server.url}/status").json()["roles"]
    body = next(role["process_id"] for role in roles if role["role"] == "body")
    shards = [role["process_id"] for role in roles if role["role"] == "shard"]
    assert shards[0] == body
    return shards[1:]


def test_a_cluster_of_actors_says_what_one_process_says(tmp_path: Path) -> None:
    """Two shards, two samplers and a drafter, of which a shard is killed under four streams."""
    (tmp_path / "one").mkdir()
    with running_server(tmp_path / "one", *FLAGS) as server:
        expected = [_tell(server, seed) for seed in range(4)]
    (tmp_path / "many").mkdir()
    flags = (*FLAGS, "--shards", "2", "--shard-spares", "1", "--samplers", "2")
    with running_server(tmp_path / "many", *flags, backend="ray") as server:
        assert [_tell(server, seed) for seed in range(4)] == expected
        before = _shards(server)
        events = [threading.Event() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(_tell, server, seed, event) for seed, event in enumerate(events)]
            for event in events:
                assert event.wait(60)
            os.kill(before[0], signal.SIGKILL)
            assert [each.result(120) for each in running] == expected
        assert server.metric("lexshard_shards_lost_total") == 1
        assert server.metric("lexshard_engine_restarts_total") == 0
        after = _shards(server)
        assert len(after) == 1
        assert after != before
        page = subprocess.run(
            [sys.executable, "-m", "lexshard.serve_app.cli", "status", "--url", server.url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in ("body 0", "drafter 0", "shard 1", f" {after[0]} ", "sampler 1", "1 groups"):
            assert words in page
    wait(lambda: not any(map(psutil.pid_exists, after)), 10, "the shards to end")
