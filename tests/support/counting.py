"""API processes that do nothing but count the requests they are told of."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.observability.server_metrics import ServerMetrics
from lexshard.serve_app.request_record import RequestRecord
from tests.support.mock_engine import MockEngine

PATH = "/v1/completions"


def metrics(seats: Seats | None, engine: MockEngine | None = None) -> ServerMetrics:
    return ServerMetrics(engine or MockEngine(), Admission(8, 100, None), (PATH, "/health"), seats)


def record(status: int = 200, path: str = PATH, method: str = "POST") -> RequestRecord:
    """One that took half a second: ten tokens, the first after a tenth of a second."""
    made = RequestRecord("name", method, path, "client", status=status)
    made.start_time -= 0.5
    made.first_token_time = made.start_time + 0.1
    made.prompt_tokens, made.completion_tokens = 4, 10
    return made


def values(text: bytes) -> dict[str, float]:
    """Every sample by its name and labels."""
    lines = (line.rsplit(" ", 1) for line in text.decode().splitlines() if line[:1] != "#")
    return {name: float(value) for name, value in lines}


def count_and_die(folder: Path, processes: int, requests: int) -> None:
    own = metrics(Seats(folder, processes))
    for _ in range(requests):
        own.observe(record())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    count_and_die(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
