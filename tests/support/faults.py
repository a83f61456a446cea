"""Processes of a running server, and what kills and stops do to its clients."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil

from tests.support.backends import COMMANDS, Role
from tests.support.real_server import Server

# A text of 1,500 tokens takes 3 s, and 0.3 by the body that is chosen otherwise: less than it takes
# to kill what it depends on where other work has the cores, too.
SLOW_BODY = ("--body", "general")
PROMPT = "Once upon a time there was a little girl who"


def processes_of(server: Server, role: Role) -> list[psutil.Process]:
    """Those of a role that live."""
    return alive(named(server, COMMANDS[server.backend, role]))


def process_of(server: Server, name: str) -> psutil.Process:
    """The only process the server has started whose command line holds ``name``."""
    found = named(server, name)
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def named(server: Server, piece: str) -> list[psutil.Process]:
    """Those that the server has started whose command line holds ``piece``."""
    found = []
    for child in family(server):
        with suppress(psutil.Error):
            if piece in " ".join(child.cmdline()):
                found.append(child)
    return found


def family(server: Server) -> list[psutil.Process]:
    """All that the server has started."""
    return psutil.Process(server.process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]


class Listener(threading.Thread):
    """A client that reads one seeded stream to its end; when it got what is in ``times``."""

    def __init__(self, server: Server, tokens: int = 1500) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.events: list[Any] = []
        self.times: list[float] = []
        self.done = False
        self.broken: httpx.HTTPError | None = None
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "prompt": PROMPT,
            "max_tokens": tokens,
            "seed": 11,
            "temperature": 0.8,
            "ignore_eos": True,
            "stream": True,
        }

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
                for line in response.iter_lines():
                    self._hear(line)
        except httpx.HTTPError as error:
            self.broken = error

    def _hear(self, line: str) -> None:
        self.times.append(time.monotonic())
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
        elif data:
            event = json.loads(data)
            self.events.append(event)
            if "choices" in event:
                self.text += event["choices"][0]["text"]

    def has_begun(self) -> bool:
        return len(self.text) > 100

    def was_told_of_the_end(self) -> bool:
        """Whether the server, which has been told to stop, let the text end, or said why not."""
        last = self.events[-1]
        if "error" in last:
            return "shutting down" in last["error"]["message"]
        return bool(last["choices"][0]["finish_reason"] == "length")


def ask(server: Server, seconds: float = 30.0) -> int:
    """The status of a request for two tokens; 0 where there is no answer at all."""
    body = {"prompt": "Hello", "max_tokens": 2}
    try:
        url = f"{server.url}/v1/completions"
        return httpx.post(url, json=body, timeout=seconds).status_code
    except httpx.HTTPError:
        return 0


def seconds_until_served(server: Server, limit: float) -> tuple[float, float]:
    """How long requests fail from now on, and how long the slowest of them took."""
    began = time.monotonic()
    slowest = 0.0
    failed = False
    while time.monotonic() - began < limit:
        asked = time.monotonic()
        status = ask(server)
        slowest = max(slowest, time.monotonic() - asked)
        failed = failed or status != 200
        if status == 200 and (failed or time.monotonic() - began > 5):
            return time.monotonic() - began, slowest
        time.sleep(0.1)
    raise AssertionError(f"not served again within {limit} s")
