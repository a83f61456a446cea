"""``/metrics`` speaks for all API processes, whichever is asked, and never takes anything back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lexshard.serve_app.api_processes.seats import Seats
from tests.support.counting import PATH, metrics, record, values
from tests.support.mock_engine import MockEngine
from tests.support.paths import ROOT

ANSWERED = f'lexshard_http_requests_total{{method="POST",path="{PATH}",status="200"}}'


def test_every_process_tells_the_sum(tmp_path: Path) -> None:
    first, second = (metrics(Seats(tmp_path, 2)) for _ in range(2))
    for _ in range(3):
        first.observe(record())
    second.observe(record())
    second.observe(record(404, "/somewhere", "PUT"))
    first.observe(record(200, "/health", "HEAD"))
    told = values(first.text())
    assert told == values(second.text())
    assert told[ANSWERED] == 4
    other = 'lexshard_http_requests_total{method="other",path="other",status="404"}'
    assert told[other] == 1
    assert told['lexshard_http_requests_total{method="HEAD",path="/health",status="200"}'] == 1
    assert told['lexshard_http_tokens_total{kind="completion"}'] == 60
    assert told['lexshard_time_to_first_token_seconds_bucket{le="0.05"}'] == 0
    assert told['lexshard_time_to_first_token_seconds_bucket{le="+Inf"}'] == 6
    assert told["lexshard_time_to_first_token_seconds_count"] == 6
    assert abs(told["lexshard_time_to_first_token_seconds_sum"] - 0.6) < 1e-9
    assert told['lexshard_request_seconds_bucket{le="0.2"}'] == 0
    assert told['lexshard_request_seconds_bucket{le="1.0"}'] == 6


@pytest.mark.slow
def test_what_a_killed_process_has_counted_stays_and_is_gone_on_with(tmp_path: Path) -> None:
    own = metrics(Seats(tmp_path, 1))
    own.observe(record())
    for deaths in (1, 2, 3):
        command = [sys.executable, "-m", "tests.support.counting", str(tmp_path), "1", "5"]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
        assert values(own.text())[ANSWERED] == 1 + 5 * deaths


def test_a_process_alone_counts_for_itself() -> None:
    one, other = metrics(None), metrics(None)
    one.observe(record())
    assert values(one.text())[ANSWERED] == 1
    assert ANSWERED not in values(other.text())


def test_an_engine_that_all_have_lost_was_lost_once(tmp_path: Path) -> None:
    """Each process sees its deaths, and a later one only those that come."""
    name = "lexshard_engine_restarts_total"
    engines = [MockEngine() for _ in range(2)]
    processes = [metrics(Seats(tmp_path, 2), engine) for engine in engines]
    for engine in engines:
        engine.restarts = 2
    assert [values(each.text())[name] for each in processes] == [2, 2]
    later = MockEngine()
    successor = metrics(Seats(tmp_path, 2), later)
    assert values(successor.text())[name] == 2
    later.restarts = 1
    successor.observe(record())  # counts it, and may die before it is asked
    assert values(processes[0].text())[name] == 3
