"""Somebody who asks for ``/health`` all the time, in a process that nothing else keeps busy.

    python -m lexshard.loadtest.chaos.health PORT

prints, for every question, when it was asked, how long the answer took, its status (0: none) and
what it says.
"""

from __future__ import annotations

import asyncio
import http.client
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.loadtest.bench.record import percentile

PAUSE_SECONDS = 0.1
GIVE_UP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Look:
    """One question: when (of the monotonic clock), seconds until the answer, status, words."""

    when: float
    seconds: float
    status: int
    words: str = ""

    @property
    def answered(self) -> float:
        return self.when + self.seconds


class HealthWatch:
    """``async with``: asks until the end; ``looks`` grows meanwhile."""

    def __init__(self, port: int) -> None:
        self.looks: list[Look] = []
        self._port = port

    async def __aenter__(self) -> HealthWatch:
        module = "lexshard.loadtest.chaos.health"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, str(self._port), stdout=asyncio.subprocess.PIPE
        )
        self._reading = asyncio.ensure_future(self._read())
        while not self.looks and not self._reading.done():
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            when, seconds, status, words = line.decode(errors="replace").split(maxsplit=3)
            self.looks.append(Look(float(when), float(seconds), int(status), words.strip()))

    def since(self, moment: float) -> list[Look]:
        return [look for look in self.looks if look.answered >= moment]

    def slowest_since(self, moment: float) -> float:
        return max((look.seconds for look in self.since(moment)), default=0.0)


def latencies(looks: Sequence[Look]) -> str:
    """The middle, the 99th percentile and the slowest, in milliseconds."""
    milliseconds = [1e3 * look.seconds for look in looks]
    middle, high = percentile(milliseconds, 50), percentile(milliseconds, 99)
    return f"p50 {middle:.1f} ms, p99 {high:.1f} ms, slowest {max(milliseconds):.1f} ms"


def _ask(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_SECONDS)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status, " ".join(response.read().decode(errors="replace").split())
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def main(port: int) -> None:
    """Asks until it is ended."""
    while True:
        when = time.monotonic()
        status, words = _ask(port)
        print(f"{when:.6f} {time.monotonic() - when:.6f} {status} {words}", flush=True)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
