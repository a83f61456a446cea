"""A server is ready when all of its API processes are; each of them tells of its failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start import readiness
from lexshard.serve_app.start.readiness import StartupError, Waiting, wait_until_ready
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import listening


def wait_for(url: str, answers: Sequence[list[Waiting | None]]) -> list[str]:
    """What is told while a server of two processes answers so, one list at a look."""
    told: list[str] = []
    looks = iter(answers)

    def ask_all(method: str, *, seconds: float) -> list[Any]:
        assert method == "waits_for"
        return next(looks)

    port = int(url.rpartition(":")[2])
    wait_until_ready(ServeConfig(model="m", port=port, api_processes=2), told.append, ask_all)
    assert list(looks) == []
    return told


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "POLL_SECONDS", 0.01)


def test_every_process_is_waited_for_and_every_reason_told_once() -> None:
    with listening() as url:
        starting: list[Waiting | None] = [None, ("not ready: b", True)]
        told = wait_for(url, [[], [None], starting, starting, [None, None]])
    assert told == ["0 of 2 API processes answer", "1 of 2 API processes answer", "not ready: b"]


def test_a_failure_that_one_process_knows_ends_the_wait() -> None:
    with listening() as url, pytest.raises(StartupError, match="no such model"):
        wait_for(url, [[("not ready: a", True), ("no such model", False)]])


def test_a_failure_told_at_the_door_ends_the_wait() -> None:
    engine = MockEngine(health_reason="it is broken", failure="broken")
    with listening(engine) as url, pytest.raises(StartupError, match="it is broken"):
        wait_for(url, [])
