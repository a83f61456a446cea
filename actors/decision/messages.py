"""What the engine and its samplers say to each other.

A sampler keeps the state of its sequences from deltas: what was opened, which tokens were appended,
what was closed. A decision is a pure function of that state and of a `DecisionWork`, so that work
lost with a sampler is done again elsewhere with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.configuration import SIGMOID_LIMITS
from lexshard.actors.messages import RowDecision
from lexshard.actors.states.deltas import NO_DELTAS, Deltas
from lexshard.actors.states.row_table import RowNames


@dataclass(frozen=True, slots=True, eq=False)
class CandidateRows:
    """Per row the tokens that can still win, with raw canonical logits (before any processor).

    Ragged: row ``r`` owns ``ids[offsets[r]:offsets[r + 1]]``, sorted by id. ``truncated`` says that
    top-p has been applied already: the tokens are the nucleus itself.
    """

    rows: RowNames  # [N]
    ids: npt.NDArray[np.int32]  # [total]
    raw: npt.NDArray[np.float32]  # [total]
    offsets: npt.NDArray[np.int64]  # [N + 1]
    truncated: npt.NDArray[np.bool_]  # [N]


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """Rows whose decision needs the raw canonical logit of every token.

    ``logits`` [B, V] fp32; ``maxima`` [B, ceil(V / 64)] holds the largest of every 64 of them,
    where the producer has it at hand. Both are views of memory that is the producer's: they hold
    until the decision is made.
    """

    rows: RowNames  # [B]
    logits: npt.NDArray[np.float32]
    maxima: npt.NDArray[np.float32] | None = None


def some_rows(dense: DenseRows, rows: Sequence[int]) -> DenseRows:
    """Some of the rows, in this order."""
    chosen = list(rows)
    return DenseRows(
        dense.rows.some(chosen),
        dense.logits[chosen],
        None if dense.maxima is None else dense.maxima[chosen],
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecisionWork:
    """One step's decisions for one sampler, and what it must know before.

    Either part may be None. The decisions come back in the order of ``candidates.rows``, then
    of ``dense.rows``.
    """

    step: int
    deltas: Deltas = NO_DELTAS
    candidates: CandidateRows | None = None
    dense: DenseRows | None = None


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """What a sampler decided: a token for every row, or None where every token is excluded.

    ``busy_seconds`` is the time it computed, without waiting.
    """

    step: int
    decisions: tuple[RowDecision | None, ...]
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """What a sampler must know to start, wherever it runs.

    ``threads`` share its rows. ``capacity`` is how many penalised sequences it has room for at
    first. ``hot_vocabulary`` is the file of the tokens to look at first, if any; it must be of the
    tokenizer whose hash is ``tokenizer``, where that is known. ``sigmoid`` are alpha and beta of
    guesses that are tested by sigmoids.
    """

    vocabulary_size: int
    eos_ids: tuple[int, ...]
    threads: int = 1
    capacity: int = 16
    hot_vocabulary: str | None = None
    tokenizer: str | None = None
    sigmoid: tuple[float, float] = SIGMOID_LIMITS
