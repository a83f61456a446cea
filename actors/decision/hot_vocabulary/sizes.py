"""How much of the tail a decision visits, how long that takes, and how many hot tokens then pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.decision import block_maxima, decide_dense
from lexshard.kernels.hot_vocab import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    fit_cost,
    interpolate,
)

Ids = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
# Decides a fixed set of rows with these hot ids (sorted); tail tokens visited per row.
Decide = Callable[[Ids], npt.NDArray[np.int64]]

# Equal shares of the ways in which sampling is asked for.
WAYS = (
    SamplingParameters(temperature=1.0),
    SamplingParameters(temperature=0.7, top_p=0.95),
    SamplingParameters(temperature=0.8, top_k=50),
    SamplingParameters(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.2,
    ),
)
ROWS = 8  # decided in one call
LEAST_SAVING = 0.05  # of a row's time; with less the hot set is off
CALIBRATION_SECONDS = 0.3
CALIBRATED_SIZES = 6


def decider(
    rows: npt.NDArray[np.float32],
    histories: Sequence[tuple[int, ...]],
    parameters: Sequence[SamplingParameters] = WAYS,
) -> Decide:
    """Decides ``rows`` [B, V] of canonical logits, as a sampler gets them, after ``histories`` [B]
    whose second halves were drawn; ``parameters`` take turns."""
    states = SequenceStates(rows.shape[1], (), len(rows))
    for which, history in enumerate(histories):
        half = (len(history) + 1) // 2
        own = parameters[which % len(parameters)]
        states.open(which, Request("", which, history[:half], own, resumed_ids=history[half:]))
    table = states.table(RowNames(tuple(range(len(rows)))))
    maxima = block_maxima(rows)

    def decide(hot_ids: Ids) -> npt.NDArray[np.int64]:
        return decide_dense(rows, maxima, table.controls, table.flat, hot_ids).visited

    return decide


def synthetic_decider(vocabulary_size: int) -> Decide:
    """Where no logits are at hand: normal ones."""
    random = np.random.default_rng(0)
    rows = (3.0 * random.standard_normal((ROWS, vocabulary_size))).astype(np.float32)
    histories = random.integers(0, vocabulary_size, (ROWS, 128)).tolist()
    return decider(rows, list(map(tuple, histories)))


def measure(decide: Decide, order: Ids, sizes: Sizes, seconds: float) -> tuple[Floats, Floats]:
    """Tail tokens visited and seconds per row [m] with the first ``sizes`` [m] of ``order`` hot.

    Every size once for the compiler and caches, then rounds for so many ``seconds``, at least one;
    the quickest run of each counts.
    """
    sets = [np.sort(order[:size]) for size in sizes.tolist()]
    tails = [decide(hot_ids) for hot_ids in sets]
    best = np.full(len(sets), np.inf)
    ends = time.perf_counter() + seconds
    while not np.isfinite(best[0]) or time.perf_counter() < ends:
        for index, hot_ids in enumerate(sets):
            started = time.perf_counter()
            decide(hot_ids)
            best[index] = min(best[index], time.perf_counter() - started)
    return np.array([tail.mean() for tail in tails]), best / len(tails[0])


def calibrate(decide: Decide, order: Ids, sizes: Sizes) -> Cost:
    """What a visit costs on this machine, at six of ``sizes`` [m]."""
    some = np.unique(np.linspace(0, len(sizes) - 1, CALIBRATED_SIZES).round().astype(np.int64))
    return fit_cost(sizes[some], *measure(decide, order, sizes[some], CALIBRATION_SECONDS))


def size_that_pays(curve: Curve, cost: Cost, vocabulary_size: int) -> int:
    """The size with the least expected cost; 0 (off) where no size is expected to save 5%."""
    size = best_size(curve, cost, vocabulary_size)
    two = np.array([0, size])
    off, on = expected_cost(two, interpolate(curve, two), cost, vocabulary_size)
    return size if on <= (1.0 - LEAST_SAVING) * off else 0
