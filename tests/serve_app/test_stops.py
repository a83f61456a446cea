"""How soon a server is gone that has been told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from lexshard.serve_app.api_processes.api_process import TICK_SECONDS, HttpServer
from tests.support.backends import PROCESS_AND_SLOW_RAY, Backend
from tests.support.real_server import running_server, wait

GRACE = 1
# After the streams have had their time; with other work on the machine it may take that long.
AFTER_SECONDS = 5
ENDLESS = {
    "model": "lexshard-demo",
    "prompt": "Once upon a time",
    "n": 8,
    "max_tokens": 2000,
    "stream": True,
    "ignore_eos": True,
}


@pytest.mark.parametrize("backend", PROCESS_AND_SLOW_RAY)
def test_a_stop_takes_the_grace_of_open_streams_and_little_more(
    tmp_path: Path, backend: Backend
) -> None:
    grace = ("--shutdown-grace-seconds", str(GRACE))
    with running_server(tmp_path, *grace, backend=backend) as server:
        wait(lambda: "lexshard is ready" in server.log.read_text(), 60, "the banner")
        events: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS) as stream:
            lines = (line for line in stream.iter_lines() if line)
            events.append(next(lines))
            server.process.send_signal(signal.SIGINT)
            began = time.monotonic()
            events.extend(lines)
        assert server.process.wait(30) == 0
        assert time.monotonic() - began < GRACE + AFTER_SECONDS
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["message"] == "the server is shutting down"
    # What Ray says of its own end is not for users.
    told = server.log.read_text()
    assert "raylet" not in told
    assert told.rstrip().endswith("lexshard: stopped")


def test_an_api_process_leaves_signals_to_the_process_that_keeps_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with HttpServer(uvicorn.Config(lambda: None)).capture_signals():
        assert signal.getsignal(signal.SIGTERM) is before


def test_an_api_process_that_is_to_stop_does_not_wait_for_its_clock() -> None:
    async def check() -> float:
        server = HttpServer(uvicorn.Config(lambda: None))
        looking = asyncio.create_task(server.main_loop())
        await asyncio.sleep(0.05)
        began = time.monotonic()
        server.stop()
        with suppress(TimeoutError):
            await asyncio.wait_for(looking, 2 * TICK_SECONDS)
        return time.monotonic() - began

    assert asyncio.run(check()) < TICK_SECONDS / 2
