"""`lexshard serve` with samplers, shards and a drafter: clients notice neither where tokens are
decided nor who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.faults import alive, family
from tests.support.paths import DEMO_DRAFT, ROOT
from tests.support.real_server import Server, running_server, wait

pytestmark = pytest.mark.slow

SEEDS = range(6)
# Nearly half of its tokens are forced; seed 5 has log-probabilities, for which all are drawn.
RECORDS = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "years": {"type": "integer"}},
        "required": ["name", "years"],
        "additionalProperties": False,
    },
}
FLAGS = ("--draft", str(DEMO_DRAFT))


def _tell(server: Server, seed: int, started: threading.Event | None = None) -> str:
    """A stream whose controls depend on its seed."""
    text = ""
    more: dict[str, Any] = {"top_k": 50 if seed % 3 else -1, "repetition_penalty": 1.1}
    if seed < 4:
        more["ignore_eos"] = True
    else:
        more["structured_outputs"] = {"json": RECORDS}
    stream = server.client().completions.create(
        model="lexshard-demo",
        prompt="Once upon a time there was a little girl who",
        max_tokens=400,
        seed=seed,
        temperature=0.8,
        top_p=1.0 if seed % 2 else 0.95,
        frequency_penalty=0.1,
        logprobs=2 if seed in (3, 5) else None,
        stream=True,
        extra_body={"min_p": 0.01 if seed == 2 else 0.0, **more},
    )
    for chunk in stream:
        text += chunk.choices[0].text
        if started is not None and len(text) > 100:
            started.set()
    return text


def _texts(server: Server, lose: Callable[[], None] | None = None) -> list[str]:
    """What the streams say, in the midst of which something is lost."""
    events = [threading.Event() for _ in SEEDS]
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        running = [pool.submit(_tell, server, seed, event) for seed, event in enumerate(events)]
        if lose is not None:
            for event in events:
                assert event.wait(60)
            lose()
        return [each.result(120) for each in running]


def _samplers(server: Server) -> list[psutil.Process]:
    living = alive(family(server))
    return [each for each in living if "lexshard.cluster.samplers.main" in each.cmdline()]


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "lexshard" in name}


def _shards(server: Server) -> list[int]:
    """The processes of the shards that are not the engine's own."""
    roles = httpx.get(f"{server.url}/status").json()["roles"]
    body = next(role["process_id"] for role in roles if role["role"] == "body")
    shards = [role["process_id"] for role in roles if role["role"] == "shard"]
    assert shards[0] == body
    return shards[1:]


def test_killed_samplers_are_replaced_and_no_stream_notices(tmp_path: Path) -> None:
    """And nothing of samplers, killed or not, outlives the server."""
    segments = _shared_memory()
    with running_server(tmp_path, "--samplers", "2") as server:
        expected = _texts(server)
        assert server.metric("lexshard_sampler_busy_seconds_total") > 0
        first, second = _samplers(server)
        assert _texts(server, first.kill) == expected
        assert server.metric("lexshard_samplers_lost_total") == 1
        assert server.metric("lexshard_engine_restarts_total") == 0
        wait(lambda: len(_samplers(server)) == 2, 30, "the replacement")
        assert _texts(server) == expected
        samplers = [first, second, *_samplers(server)]
    wait(lambda: alive(samplers) == [], 10, "the samplers to end")
    assert not _shared_memory() - segments


def test_a_cluster_of_actors_says_what_one_process_says(tmp_path: Path) -> None:
    """Two shards, two samplers and a drafter, of which a shard is killed under four streams."""
    (tmp_path / "one").mkdir()
    with running_server(tmp_path / "one", *FLAGS) as server:
        expected = _texts(server)
    (tmp_path / "many").mkdir()
    samplers = ("--samplers", "2", "--sampler-placement", "ray")
    flags = (*FLAGS, "--shards", "2", "--shard-spares", "1", *samplers)
    with running_server(tmp_path / "many", *flags, backend="ray") as server:
        assert _texts(server) == expected
        [before] = _shards(server)
        assert _texts(server, lambda: os.kill(before, signal.SIGKILL)) == expected
        assert server.metric("lexshard_shards_lost_total") == 1
        assert server.metric("lexshard_engine_restarts_total") == 0
        [after] = _shards(server)
        assert after != before
        page = subprocess.run(
            [sys.executable, "-m", "lexshard.serve_app.cli", "status", "--url", server.url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in ("body 0", "drafter 0", "shard 1", f" {after} ", "sampler 1", "1 groups"):
            assert words in page
    wait(lambda: not psutil.pid_exists(after), 10, "the shards to end")
