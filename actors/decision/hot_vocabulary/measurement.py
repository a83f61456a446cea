"""How much of the tail a decision visits, and how long it takes, at every size of the hot set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.hot_vocabulary.file import MixPart
from lexshard.actors.decision.hot_vocabulary.vocabulary import Decide
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.flat_needs import flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.decision import block_maxima, decide_dense
from lexshard.kernels.draw import Controls
from lexshard.kernels.hot_vocab import target_distribution
from lexshard.kernels.penalties import Adjustments, adjust

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

# Equal shares of the ways in which sampling is asked for.
MIX = {
    "temperature 1": SamplingParameters(temperature=1.0),
    "temperature 0.7, top-p 0.95": SamplingParameters(temperature=0.7, top_p=0.95),
    "temperature 0.8, top-k 50": SamplingParameters(temperature=0.8, top_k=50),
    "all controls": SamplingParameters(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.2,
    ),
}
COLUMNS = 8  # rows decided in one call
REPEATS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Means over positions at every hot-vocabulary size [m]; times are the quickest of three."""

    hit_rate: Floats  # [m] hot mass of the filtered, tempered distribution, over the whole mix
    mix: tuple[MixPart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Up to eight rows as a sampler gets them, with their controls."""

    logits: npt.NDArray[np.float32]  # [V, B]
    maxima: npt.NDArray[np.float32]  # [ceil(V / 64), B]
    controls: Controls
    adjustments: Adjustments

    def decide(self, hot_ids: Ids) -> npt.NDArray[np.int64]:
        """Decide them; tail tokens visited per row [B]."""
        found = decide_dense(self.logits, self.maxima, self.controls, self.adjustments, hot_ids)
        return found.visited

    def masses(self) -> Floats:
        """The filtered, tempered distribution of every row [B, V]."""
        size, count = self.logits.shape
        ids = np.tile(np.arange(size, dtype=np.int32), count)
        offsets = np.arange(count + 1, dtype=np.int64) * size
        adjusted = adjust(ids, self.logits.T.ravel(), offsets, self.adjustments)
        controls = self.controls
        return np.stack(
            [
                target_distribution(
                    row,
                    inverse_temperature=float(controls.inverse_temperature[column]),
                    top_k=int(controls.top_k[column]),
                    top_p=float(controls.top_p[column]),
                    min_p=math.exp(controls.log_min_p[column]),
                )
                for column, row in enumerate(adjusted.reshape(count, size))
            ]
        )


def columns_of(
    rows: npt.NDArray[np.float32],
    histories: Sequence[tuple[int, ...]],
    parameters: Sequence[SamplingParameters],
) -> Columns:
    """``rows`` [B, V] of canonical logits after ``histories`` [B], whose second halves were drawn;
    each with ``parameters`` [B] of its own."""
    states = SequenceStates(rows.shape[1], (), len(rows))
    opened = []
    for which, history in enumerate(histories):
        half = (len(history) + 1) // 2
        own = parameters[which]
        request = Request("", which, history[:half], own, resumed_ids=history[half:])
        opened.append(states.open(which, request))
    logits = np.ascontiguousarray(rows.T)
    return Columns(
        logits,
        block_maxima(logits),
        Controls(
            inverse_temperature=np.array([s.inverse_temperature for s in opened], np.float64),
            top_k=np.array([s.top_k for s in opened], np.int64),
            top_p=np.array([s.parameters.top_p for s in opened], np.float64),
            log_min_p=np.array([s.log_min_p for s in opened], np.float64),
            key=np.array([s.key for s in opened], np.uint64),
            position=np.array([s.position for s in opened], np.uint64),
        ),
        flatten_adjustments([state.adjustment() for state in opened]),
    )


def synthetic_decide(vocabulary_size: int, seed: int = 0) -> Decide:
    """For `HotVocabulary.calibrate` where no logits are at hand: normal ones, all of `MIX`."""
    random = np.random.default_rng(seed)
    rows = (3.0 * random.standard_normal((COLUMNS, vocabulary_size))).astype(np.float32)
    histories = [tuple(random.integers(0, vocabulary_size, 128).tolist()) for _ in range(COLUMNS)]
    ways = list(MIX.values())
    return columns_of(rows, histories, [ways[row % len(ways)] for row in range(COLUMNS)]).decide


def measure(
    rows: npt.NDArray[np.float32],
    histories: Sequence[tuple[int, ...]],
    order: Ids,
    sizes: npt.NDArray[np.int64],
    seed: int,
    advance: Callable[[float], None],
) -> Measured:
    """Decide ``rows`` [n, V] in every way of `MIX`, with the first tokens of ``order`` hot.

    ``advance`` is told the share of the work that is done.
    """
    sets = [np.sort(order[:size]) for size in sizes.tolist()]
    inside = sizes > 0
    hit_rate = np.zeros(len(sizes))
    mix = []
    for which, (name, parameters) in enumerate(MIX.items()):
        chosen = replace(parameters, seed=seed + which)
        visited, seconds = np.zeros(len(sizes)), np.zeros(len(sizes))
        for first in range(0, len(rows), COLUMNS):
            some = slice(first, first + COLUMNS)
            columns = columns_of(rows[some], histories[some], [chosen] * COLUMNS)
            by_rank = np.cumsum(columns.masses()[:, order], axis=1)
            hit_rate[inside] += by_rank[:, sizes[inside] - 1].sum(axis=0)
            for index, hot_ids in enumerate(sets):
                visited[index] += columns.decide(hot_ids).sum()
                seconds[index] += min(_time(columns, hot_ids) for _ in range(REPEATS))
            advance(min(COLUMNS, len(rows) - first) / (len(rows) * len(MIX)))
        means = (tuple((sums / len(rows)).tolist()) for sums in (visited, seconds))
        mix.append(MixPart(name, *means))
    return Measured(hit_rate / (len(rows) * len(MIX)), tuple(mix))


def _time(columns: Columns, hot_ids: Ids) -> float:
    started = time.perf_counter()
    columns.decide(hot_ids)
    return time.perf_counter() - started
