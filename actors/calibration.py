"""Which tier screens best on this machine, measured on real hidden states when an engine starts.

The figures depend on the machine, on the model and on the number of rows in a step, so nothing is
assumed: every tier and the dense screen decide the same steps, and the fastest is chosen per size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actors.ladder import Choices
from actors.messages import Candidates, Need
from actors.screens import DENSE

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Short steps are repeated more often: one interruption must not decide.
FEWEST_REPEATS, MOST_REPEATS = 3, 15
SECONDS = 0.02
# A tier so much slower than the best at one size is not measured at larger ones.
HOPELESS = 2.5
TOP_K = 50
KINDS = 3  # of needs, see `_need`
# Timings this close are the same: machines are noisy.
BARELY = 1.1


class LadderHead(Protocol):
    """A head whose first screen can be chosen."""

    vocabulary_size: int

    def start_with(self, choices: Choices) -> None: ...

    def screen(self, hidden: npt.NDArray[np.float32], needs: Sequence[Need]) -> Any: ...

    def rescore(self, thresholds: Any) -> Candidates: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """What a step of ``rows`` rows took when it started with ``screen``."""

    rows: int
    screen: str
    milliseconds: float  # the fastest of a few runs, mean over the mixes of needs
    rescored_share: float  # of the vocabulary, mean over the rows and the mixes


def calibrate(
    shard: LadderHead, names: Sequence[str], hidden: npt.NDArray[np.float32], largest: int
) -> list[Timing]:
    """Times steps of up to ``largest`` rows with each of ``names``; ``hidden`` [M, d] are samples.

    A third of the rows each is greedy, drawn at temperature 1, and cut to the 50 best; too few rows
    for that are timed with one mix of needs after the other.
    """
    timings: list[Timing] = []
    left = list(names)
    for rows in [size for size in SIZES if size <= max(largest, 1)]:
        states = hidden[np.arange(rows) * max(1, len(hidden) // rows) % len(hidden)]
        mixes = [[_need(row + shift) for row in range(rows)] for shift in range(KINDS)]
        if rows >= KINDS:
            del mixes[1:]
        states = np.ascontiguousarray(states)
        timed = [_mean([_timed(shard, name, states, needs) for needs in mixes]) for name in left]
        timings.extend(timed)
        best = min(each.milliseconds for each in timed)
        left = [each.screen for each in timed if each.milliseconds <= HOPELESS * best]
    return timings


def choose(timings: Sequence[Timing], *, certified: bool) -> Choices:
    """The fastest screen by number of rows; never the dense one where ``certified``.

    What was chosen for fewer rows is kept where another one is barely faster.
    """
    choices: list[tuple[int, str]] = []
    for rows in sorted({each.rows for each in timings}):
        taken = {
            each.screen: each.milliseconds
            for each in timings
            if each.rows == rows and not (certified and each.screen == DENSE)
        }
        if not taken:
            continue
        best = min(taken, key=lambda screen: taken[screen])
        before = choices[-1][1] if choices else None
        if before in taken and taken[before] <= BARELY * taken[best]:
            continue
        if before != best:
            choices.append((rows, best))
    return tuple(choices)


def _need(row: int) -> Need:
    key, position = row, 100 + row
    if row % KINDS == 0:
        return Need("top1", key=key, position=position, inverse_temperature=1.0)
    if row % KINDS == 1:
        return Need("topk", k=TOP_K, key=key, position=position, inverse_temperature=1.0)
    return Need("top1")


def _mean(timings: Sequence[Timing]) -> Timing:
    """One screen's timings for as many rows, with different needs."""
    return replace(
        timings[0],
        milliseconds=float(np.mean([each.milliseconds for each in timings])),
        rescored_share=float(np.mean([each.rescored_share for each in timings])),
    )


def _timed(
    shard: LadderHead, name: str, hidden: npt.NDArray[np.float32], needs: Sequence[Need]
) -> Timing:
    shard.start_with(((1, name),))
    seconds: list[float] = []
    share = 0.0
    while len(seconds) <= FEWEST_REPEATS or (
        len(seconds) <= MOST_REPEATS and sum(seconds[1:]) < SECONDS
    ):
        started = time.perf_counter()
        candidates = shard.rescore(shard.screen(hidden, needs))
        seconds.append(time.perf_counter() - started)
        share = float(candidates.offsets[-1]) / (len(needs) * shard.vocabulary_size)
    return Timing(len(needs), name, 1000.0 * min(seconds[1:]), share)
