"""Which tier screens best on this machine, measured on real hidden states when an engine starts.

The figures depend on the machine, on the model, on the number of rows in a step and on what they
need, so nothing is assumed: every tier and the dense screen decide the same steps, and the fastest
is chosen per size and kind of step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lexshard.actors.head.ladder import STEP_KINDS, Choices, StepKind
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.screens import DENSE
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels import pool

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Hidden states differ in how many tokens they leave: one alone must not decide.
FEWEST_STATES = 4
# Short steps are repeated more often: one interruption must not decide either. The first turn of a
# size is slower and does not count as time.
FEWEST_TURNS, MOST_TURNS = 2, 15
SECONDS = 0.02  # per screen and size
# A tier so much slower than the best at one size is not measured at larger ones.
HOPELESS = 2.5
TOP_K = 50
# Timings this close are the same: machines are noisy.
BARELY = 1.1

SampleStep = tuple[npt.NDArray[np.float32], RowTable]  # hidden states [N, d], N rows


class LadderHead(OutputHead, Protocol):
    """A head whose first screen can be chosen."""

    def start_with(self, choices: Choices) -> None: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """What a step of ``rows`` rows took when it started with ``screen``."""

    kind: StepKind
    rows: int
    screen: str
    milliseconds: float  # the fastest of a few runs, mean over steps with different hidden states
    rescored_share: float  # of the vocabulary, mean over the rows


# `calibrate`, or what knows already what it would find.
Calibrate = Callable[[LadderHead, Sequence[str], npt.NDArray[np.float32], int], Sequence[Timing]]


def calibrate(
    shard: LadderHead, names: Sequence[str], hidden: npt.NDArray[np.float32], largest: int
) -> list[Timing]:
    """Times steps of up to ``largest`` rows with each of ``names``; ``hidden`` [M, d] are samples.

    Steps of each kind are timed: greedy rows and draws at temperature 1 in turn, and rows that are
    cut to the 50 best. They have as many threads as were chosen for their number of rows. There are
    no timings of sizes at which one name alone was left.
    """
    timings: list[Timing] = []
    for kind in STEP_KINDS:
        left = list(names)
        for rows in [size for size in SIZES if size <= max(largest, 1)]:
            pool.begin_step(rows)
            steps = _steps(kind, rows, hidden)
            timed = _timed(shard, left, kind, steps)
            timings.extend(timed)
            best = min(each.milliseconds for each in timed)
            left = [each.screen for each in timed if each.milliseconds <= HOPELESS * best]
            if len(left) == 1:
                break
    return timings


def choose(timings: Sequence[Timing], *, certified: bool) -> tuple[Choices, Choices]:
    """The fastest screens by number of rows, of steps that need one token per row and of steps
    with top-k rows; never the dense one where ``certified``.

    Between two sizes that were timed, a screen takes what lies between its times for them. What was
    chosen for fewer rows is kept where another one is barely faster.
    """
    one, several = (
        _fastest([each for each in timings if each.kind == kind], certified) for kind in STEP_KINDS
    )
    return one, several


def _fastest(timings: Sequence[Timing], certified: bool) -> Choices:
    timed: dict[int, dict[str, float]] = {}
    for each in timings:
        if not (certified and each.screen == DENSE):
            timed.setdefault(each.rows, {})[each.screen] = each.milliseconds
    choices: list[tuple[int, str]] = []
    for rows in range(min(timed), max(timed) + 1) if timed else ():
        taken = _milliseconds(timed, rows)
        best = min(taken, key=lambda screen: taken[screen])
        before = choices[-1][1] if choices else None
        if before in taken and taken[before] <= BARELY * taken[best]:
            continue
        if before != best:
            choices.append((rows, best))
    return tuple(choices)


def _milliseconds(timed: Mapping[int, dict[str, float]], rows: int) -> dict[str, float]:
    """What a step of ``rows`` rows takes by screen: of those ``timed`` for the sizes around it."""
    low, high = max(size for size in timed if size <= rows), min(s for s in timed if s >= rows)
    if low == high:
        return timed[low]
    part, more = (rows - low) / (high - low), timed[high]
    return {
        screen: milliseconds + part * (more[screen] - milliseconds)
        for screen, milliseconds in timed[low].items()
        if screen in more
    }


def _steps(kind: StepKind, rows: int, hidden: npt.NDArray[np.float32]) -> list[SampleStep]:
    """Steps of ``rows`` rows with hidden states from all over ``hidden`` [M, d]."""
    samples = rows * max(1, FEWEST_STATES // rows)
    places = np.arange(samples) * max(1, len(hidden) // samples) % len(hidden)
    needs = [_need(kind, sample) for sample in range(samples)]
    return [
        (
            np.ascontiguousarray(hidden[places[first : first + rows]]),
            RowTable.of(needs[first : first + rows]),
        )
        for first in range(0, samples, rows)
    ]


def _need(kind: StepKind, sample: int) -> Need:
    key, position = sample, 100 + sample
    if kind == "several":
        return Need("topk", k=TOP_K, key=key, position=position, inverse_temperature=1.0)
    if sample % 2 == 0:
        return Need("top1", key=key, position=position, inverse_temperature=1.0)
    return Need("top1")


def _timed(
    shard: LadderHead, screens: Sequence[str], kind: StepKind, steps: Sequence[SampleStep]
) -> list[Timing]:
    """Every screen's timing; they take turns, so that no one has the machine's quiet moments."""
    best = np.full((len(screens), len(steps)), np.inf)
    share = np.zeros_like(best)
    enough = SECONDS * len(screens) / len(steps)
    for place, step in enumerate(steps):
        turns, seconds = 0, 0.0
        while turns < FEWEST_TURNS or (turns < MOST_TURNS and seconds < enough):
            for index, screen in enumerate(screens):
                taken, share[index, place] = _run(shard, screen, step)
                best[index, place] = min(best[index, place], taken)
                seconds += taken if turns else 0.0
            turns += 1
    milliseconds, shares = 1000.0 * best.mean(axis=1), share.mean(axis=1)
    rows = len(steps[0][1])
    return [
        Timing(kind, rows, screen, float(milliseconds[index]), float(shares[index]))
        for index, screen in enumerate(screens)
    ]


def _run(shard: LadderHead, screen: str, step: SampleStep) -> tuple[float, float]:
    """Seconds of a step that is screened with ``screen``, and the share of rows it rescored."""
    # This forgets what screens left, too: one that leaves much would give way after a few steps.
    shard.start_with(((1, screen),))
    hidden, rows = step
    started = time.perf_counter()
    candidates = shard.rescore(shard.screen(hidden, rows))
    seconds = time.perf_counter() - started
    return seconds, float(candidates.offsets[-1]) / (len(rows) * shard.vocabulary_size)
