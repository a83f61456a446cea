"""New requests while something is broken: are they answered, and how soon are they served again?"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from lexshard.loadtest.chaos.client import (
    BROKEN,
    HUNG,
    UNREACHABLE,
    WHOLE,
    Heard,
    SeededRequest,
    listen,
    new_client,
)
from lexshard.loadtest.chaos.health import HealthWatch
from lexshard.loadtest.chaos.report import ChaosRow, counted

PAUSE_SECONDS = 0.2
ANSWER_SECONDS = 5.0
QUIET_SECONDS = 5.0  # without any trouble, until a fault is taken to be none for newcomers
LONGEST_SECONDS = 150.0
SERVED_AGAIN = 5  # newcomers in a row
REQUEST = SeededRequest("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "seed": 1})


class Newcomers:
    """``async with``: a request every fifth of a second, whatever becomes of those before it."""

    def __init__(self, url: str) -> None:
        self._client = new_client(url, LONGEST_SECONDS)
        self.heard: list[Heard] = []
        self._open: list[asyncio.Task[Heard]] = []

    async def __aenter__(self) -> Newcomers:
        self._coming = asyncio.ensure_future(self._come())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()
        await self._client.aclose()

    async def _come(self) -> None:
        while True:
            heard = Heard()
            self.heard.append(heard)
            self._open.append(asyncio.ensure_future(listen(self._client, REQUEST, heard)))
            await asyncio.sleep(PAUSE_SECONDS)

    async def finish(self) -> None:
        """No more of them come; those that are here are heard out."""
        self._coming.cancel()
        await asyncio.gather(self._coming, *self._open, return_exceptions=True)

    async def until_served(self, watch: HealthWatch, mended: float) -> None:
        """Returns when the last few were served, or after very long."""
        while time.monotonic() < mended + LONGEST_SECONDS:
            ended = [each for each in self.heard if each.ended and each.sent > mended]
            calm = time.monotonic() - mended > QUIET_SECONDS
            healthy = bool(watch.looks) and watch.looks[-1].status == 200
            served = all(each.status == 200 for each in ended[-SERVED_AGAIN:])
            if calm and healthy and served and len(ended) >= SERVED_AGAIN:
                return
            await asyncio.sleep(0.1)

    def judge(
        self, row: ChaosRow, watch: HealthWatch, struck: float, mended: float, *, no_ingress: bool
    ) -> None:
        """Fills in when it was noticed, when requests were served again and the slowest answer.

        Who was taken in before it was noticed waits like a stream; everybody later is answered,
        with 200 or 503, within seconds.
        """
        here = [each for each in self.heard if each.answered >= struck]
        row.noticed = _since(struck, noticed(here, watch, struck))
        row.recovered = _since(mended, served_again(here, mended))
        late = [each for each in here if each.sent >= struck + (row.noticed or 0.0)]
        row.slowest = max((each.seconds for each in late), default=0.0)
        statuses = Counter(each.ended if not each.status else str(each.status) for each in here)
        waited = max((each.seconds for each in here if each not in late), default=0.0)
        told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
        row.note = f"newcomers: {told}; taken in before it was noticed: {waited:.1f} s"
        reasons = [trouble for each in late if (trouble := _trouble(each, no_ingress))]
        reasons += [trouble for each in here if (trouble := _wrong_status(each))]
        row.broken.extend(counted(reasons))
        row.expect(row.recovered is not None, "requests were never served again")
        texts = {text for each in self.heard if each.status == 200 for text in each.texts.values()}
        row.expect(len(texts) <= 1, f"new requests of one seed say different things: {texts}")


def noticed(here: Sequence[Heard], watch: HealthWatch, struck: float) -> float | None:
    """When somebody was first told, or found nobody; None where nobody was."""
    moments = [each.answered for each in here if each.status != 200]
    moments += [look.answered for look in watch.since(struck) if look.status != 200]
    return min(moments, default=None)


def served_again(here: Sequence[Heard], mended: float) -> float | None:
    """When the first newcomer after the last one that failed was served."""
    failed = max((each.sent for each in here if each.status != 200), default=mended)
    return min(
        (each.answered for each in here if each.status == 200 and each.sent > failed), default=None
    )


def _since(moment: float, event: float | None) -> float | None:
    return None if event is None else max(0.0, event - moment)


def _trouble(heard: Heard, no_ingress: bool) -> str | None:
    if heard.ended == HUNG or heard.seconds > ANSWER_SECONDS:
        return f"a new request waited for over {ANSWER_SECONDS:.0f} s | {heard.seconds:.1f} s"
    if heard.ended in (UNREACHABLE, BROKEN) and not no_ingress:
        return f"a new request was not answered | {heard.message}"
    return None


def _wrong_status(heard: Heard) -> str | None:
    if heard.status == 503 and (heard.retry_after is None or not heard.shaped):
        return f"503 without Retry-After or OpenAI's shape | {heard.message}"
    if heard.status not in (0, 200, 503) or (heard.status == 200 and heard.ended != WHOLE):
        return f"status {heard.status}, {heard.ended} | {heard.message}"
    return None
