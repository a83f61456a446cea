"""Locust users hear tokens when they come, leave when they want to, and tell failures by reason."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from lexshard.loadtest.client import StreamedAnswer
from tests.support.paths import ROOT
from tests.support.real_server import running_server, wait
from tests.support.scripted_endpoint import EndpointScript, scripted_endpoint

BODY = {"prompt": "some words", "max_tokens": 20, "stream": True}


def test_pieces_are_heard_one_by_one_and_leaving_cancels() -> None:
    script = EndpointScript(gap_seconds=0.05)
    with scripted_endpoint(script) as url:
        answer, calls = StreamedAnswer(), 0
        asked = requests.post(f"{url}/v1/completions", json=BODY, stream=True, timeout=10)
        with asked as response:
            for data in response.iter_content(None):
                calls += 1
                answer.feed(data, time.perf_counter())
                if len(answer.pieces) == 8:
                    break
        # A client that waits for 1 KB would have heard all eight at once.
        assert calls >= 4
        assert answer.pieces[-1] - answer.pieces[0] > 0.25
        assert answer.fault == "stream ended without a finish_reason"
        wait(lambda: script.cancelled == 1, 10, "the cancellation to be noticed")


def locust(host: str, *options: str, seconds: int = 6) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status of a run of ten users, Locust's statistics, and what else it said."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")]
    command += ["--host", host, "--headless", "-u", "10", "-r", "10", "-t", f"{seconds}s", "--json"]
    command += ["--think-seconds", "0.05", "--stop-timeout", "30", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = json.loads(ended.stdout) if ended.stdout.strip() else []
    return ended.returncode, found, ended.stderr


def counts(found: list[dict[str, Any]], key: str = "num_requests") -> dict[str, int]:
    return {each["name"]: each[key] for each in found}


@pytest.mark.slow
def test_ten_users_stream_and_leave_and_nothing_fails() -> None:
    script = EndpointScript()
    with scripted_endpoint(script) as url:
        status, found, said = locust(url, "--cancel-share", "0.3", "--shape", "spike")
    assert status == 0, said
    told = counts(found)
    assert told.keys() == {"E2E", "TTFT", "TPOT", "ITL", "cancelled"}
    assert sum(counts(found, "num_failures").values()) == 0
    assert told["TTFT"] == told["E2E"] + told["cancelled"]
    assert 0.1 < told["cancelled"] / told["TTFT"] < 0.5
    assert told["ITL"] > told["TPOT"]


@pytest.mark.slow
def test_failures_are_told_by_their_reason() -> None:
    with scripted_endpoint(EndpointScript(fault="undone", fault_every=3)) as url:
        status, found, said = locust(url, "--chat", seconds=3)
    assert status == 1
    failures = counts(found, "num_failures")
    assert 0 < failures["E2E"] == counts(found)["E2E"] - counts(found)["TTFT"]
    assert failures["TTFT"] == failures["ITL"] == failures["TPOT"] == 0
    assert "stream ended without [DONE]" in said


@pytest.mark.slow
def test_a_real_server_bears_ten_users_who_leave(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        status, found, said = locust(
            server.url, "--cancel-share", "0.3", "--trace", "mooncake-conversation", seconds=15
        )
        assert status == 0, said
        wait(lambda: server.metric("lexshard_running") == 0, 20, "all to be over")
    told = counts(found)
    assert sum(counts(found, "num_failures").values()) == 0
    assert told["cancelled"] > 0
    assert told["E2E"] > 0
