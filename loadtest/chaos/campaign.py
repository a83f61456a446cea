"""The parts of a campaign in order, and the servers they go at."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from lexshard.loadtest.chaos import combinations, random_faults
from lexshard.loadtest.chaos.fuzz import KINDS, run_fuzz
from lexshard.loadtest.chaos.kills import (
    FAULTS,
    LAST_FAULTS,
    last_fault_name,
    run_kills,
    run_last_kill,
)
from lexshard.loadtest.chaos.neighbours import run_neighbours
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.server import ServerError, ServerUnderTest, started_server
from lexshard.loadtest.chaos.soak import run_soak
from lexshard.loadtest.chaos.streams import run_streams

# Of a part whose server is gone or answers nonsense.
_FAILURES = (RuntimeError, ValueError, KeyError, httpx.HTTPError, psutil.Error, ServerError)
WITH_SAMPLER = ("--samplers", "1")
ON_RAY = ("--backend", "ray")  # where there are a controller, a raylet and a GCS, too
Attack = Callable[[ServerUnderTest], Coroutine[Any, Any, None]]


class Campaign:
    """``run`` does the parts that are asked for and leaves what they found in ``report``.

    Raises ValueError for an unknown case.
    """

    def __init__(
        self,
        report: ChaosReport,
        model: str,
        draft: str,
        options: Sequence[str],
        quick: bool,
        only: str | None,
    ) -> None:
        cases = (
            *combinations.shapes(""),
            *KINDS,
            *(fault.name for fault in FAULTS),
            *map(last_fault_name, LAST_FAULTS),
        )
        if only is not None and only.partition("/")[0] not in cases:
            raise ValueError(f"no case is called {only}; there are {', '.join(cases)}")
        self._report = report
        self._model = model
        self._draft = draft
        self._options = tuple(options)
        self._quick = quick
        self._only = only
        self._logs = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._started = 0

    def run(self, parts: Sequence[str]) -> None:
        """Servers' logs are kept where a promise was broken.

        Raises:
            ServerError: a server does not start.
        """
        if "combinations" in parts and (self._only in (None, *combinations.shapes(""))):
            combinations.run_combinations(
                self._report, self._model, self._draft, quick=self._quick, only=self._only
            )
        if "neighbours" in parts:
            drafts = () if "--draft" in self._options else ("--draft", self._draft)
            self._in_turn([("neighbours", self._neighbours)], drafts)
        attacks: dict[str, Attack] = {
            "fuzz": self._fuzz,
            "streams": self._streams,
            "soak": self._soak,
        }
        self._in_turn([(name, attacks[name]) for name in attacks if name in parts])
        if "kills" in parts:
            sampler = () if "--samplers" in self._options else WITH_SAMPLER
            if self._only is None or self._only not in map(last_fault_name, LAST_FAULTS):
                self._in_turn([("kills", self._kills)], sampler)
                if not self._quick and "--backend" not in self._options:
                    self._in_turn([("kills", self._kills)], (*sampler, *ON_RAY))
            for role in LAST_FAULTS:
                if self._only == last_fault_name(role) or (not self._only and not self._quick):
                    self._in_turn([("kills", partial(self._last, role))], ON_RAY)
        if "faults" in parts:
            sharded = () if "--shards" in self._options else random_faults.OPTIONS
            self._in_turn([("faults", self._faults)], sharded)
        if self._report.broken:
            print(f"logs of the servers: {self._logs}")
        else:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _in_turn(self, attacks: Sequence[tuple[str, Attack]], options: Sequence[str] = ()) -> None:
        """Attacks on one server, and on another one when it is no longer well."""
        left = list(attacks)
        while left:
            with self._server(left[0][0], options) as server:
                while left:
                    name, attack = left.pop(0)
                    try:
                        asyncio.run(attack(server))
                    except _FAILURES as error:
                        self._report.add(ChaosRow(name, "the rest of it", broken=[repr(error)]))
                    if left and not server.answers():
                        lost = "it is not well any more; another one is started"
                        self._report.add(ChaosRow(name, "the server afterwards", broken=[lost]))
                        break

    @contextmanager
    def _server(self, part: str, options: Sequence[str]) -> Iterator[ServerUnderTest]:
        self._started += 1
        log = self._logs / f"server-{self._started}.log"
        self._report.tell(part, "starting a server")
        with started_server(self._model, [*self._options, *options], log) as server:
            self._report.tell(part, f"it serves on port {server.port}")
            yield server

    async def _fuzz(self, server: ServerUnderTest) -> None:
        await run_fuzz(server, self._report, quick=self._quick, only=self._only)

    async def _streams(self, server: ServerUnderTest) -> None:
        await run_streams(server, self._report, quick=self._quick)

    async def _neighbours(self, server: ServerUnderTest) -> None:
        await run_neighbours(server, self._report, quick=self._quick)

    async def _soak(self, server: ServerUnderTest) -> None:
        await run_soak(server, self._report, quick=self._quick)

    async def _kills(self, server: ServerUnderTest) -> None:
        await run_kills(server, self._report, quick=self._quick, only=self._only)

    async def _faults(self, server: ServerUnderTest) -> None:
        await random_faults.run_faults(server, self._report, quick=self._quick)

    async def _last(self, role: str, server: ServerUnderTest) -> None:
        await run_last_kill(server, self._report, role)
