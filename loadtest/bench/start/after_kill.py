"""The engine is killed under a stream: when does the stream go on, and does it say the same?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.loadtest.bench.servers.asking import Asker
from lexshard.loadtest.bench.servers.running import RunningServer

TOKENS = 400
PIECES_BEFORE = 20
# An engine that dies again sooner is started after a pause.
APART_SECONDS = 7.0
TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class KilledStream:
    """``seconds`` from the kill until the stream went on. ``same``: its text is that of the same
    request on the undisturbed server."""

    seconds: float
    same: bool


def kill_under_stream(server: RunningServer, asker: Asker, seed: int) -> KilledStream:
    """Kills the engine's process under the one stream of a server that does nothing else.

    Raises:
        RuntimeError: there is no engine; the stream is refused, breaks off or ends too early.
    """
    body = asker.body(TOKENS, seed=seed, temperature=TEMPERATURE)
    undisturbed = "".join(text for _, text in asker.follow(body))
    engine = server.find("engine")
    texts: list[str] = []
    killed: float | None = None
    after: list[float] = []
    for now, text in asker.follow(body):
        texts.append(text)
        if killed is not None:
            after.append(now)
        elif len(texts) == PIECES_BEFORE:
            engine.kill()
            killed = time.perf_counter()
    if killed is None or not after:
        raise RuntimeError(f"a stream of {TOKENS} tokens had ended before its engine was killed")
    return KilledStream(silence_after(killed, after), "".join(texts) == undisturbed)


def silence_after(killed: float, moments: Sequence[float]) -> float:
    """Seconds from the kill to the end of the longest silence after it: what the engine had sent
    before it died may come a little later."""
    gaps = [
        (now - before, now) for before, now in zip([killed, *moments[:-1]], moments, strict=True)
    ]
    return max(gaps)[1] - killed
