"""Steps of a fused body and of a head that certifies them, one behind the other, in one call.

What Python does between two steps, and what three calls cost before they compute, takes a small
model as long as a quarter of its step. Tokens and candidates are those that `kernels.llama`,
`kernels.certified` and `kernels.decision` give one after the other, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels import pool
from lexshard.kernels.certified import MULTIPLICATIONS_PER_THREAD, Certified, Rows
from lexshard.kernels.decision import PackedRows
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search.types import Needs
from lexshard.kernels.steps.questions import (
    ENDS,
    FOLLOWING,
    GOES_ON,
    MASKS,
    MASKS_COME,
    NO_MASKS,
)

MOST = 2**18  # candidates of the steps of a call

__all__ = [
    "ENDS",
    "FOLLOWING",
    "GOES_ON",
    "MASKS",
    "MASKS_COME",
    "NO_MASKS",
    "AskedRows",
    "Caller",
    "Places",
    "StepsTaken",
    "no_caller",
    "take_steps",
]


class Places(NamedTuple):
    """Where the tokens of N sequences go, a row of each in every one of so many ``steps``."""

    steps: int
    first: npt.NDArray[np.int64]  # [N] positions
    tables: npt.NDArray[np.int32]  # [N, blocks]


class AskedRows(NamedTuple):
    """What N rows ask of each step, without processors of any kind. Positions are those of the
    first step; every step that is taken moves them on."""

    needs: Needs
    adjustments: Adjustments
    top_p: npt.NDArray[np.float64]  # [N] as `kernels.certified.certified_candidates` takes it
    drawing: PackedRows


class Caller(NamedTuple):
    """What a call asks between two steps.

    At address ``answering`` is a function of C of one number, a question. `FOLLOWING`: may another
    step follow tokens, which are ``told``? Where rows are ``masked`` that is asked behind every
    step but the last, else after so much ``patience``, in nanoseconds. Behind the token of row
    ``r`` ``lengths[r]`` tokens ``behind[r]`` are computed then, too. The answer is `ENDS`,
    `GOES_ON`, where ``masks`` are those of the next step, or `MASKS_COME`: then `MASKS` is asked
    when its hidden states are there, are they its own now? Of the first step ``masked`` says so,
    or `NO_MASKS` of all. Row ``r`` has ``masks[rows[r]]``, none where that is -1. Steps end before
    one of which a mask holds ``fewest`` tokens or fewer, if that is not 0.
    """

    answering: int
    masked: int
    fewest: int
    patience: int
    told: npt.NDArray[np.int64]  # [N]
    lengths: npt.NDArray[np.int64]  # [N]
    behind: npt.NDArray[np.int64]  # [N, most]
    masks: npt.NDArray[np.uint64]  # [M, blocks]
    rows: npt.NDArray[np.int64]  # [N]

    def over(self, adjustments: Adjustments) -> Adjustments:
        """``adjustments``, which have no masks, with these."""
        if not self.masked:
            return adjustments
        active = adjustments.active | (self.rows >= 0)
        return adjustments._replace(active=active, masks=self.masks, mask=self.rows)


class StepsTaken(NamedTuple):
    """T steps of N rows. ``hidden`` are the hidden states of one more, which is computed and which
    this call does not decide, and ``left`` is what is found in it; None where there is none."""

    tokens: list[list[int]]  # [T, N]
    found: Certified  # of T N rows, one step's behind the other's
    hidden: npt.NDArray[np.float32] | None  # [N, d]
    left: Certified | None  # of N rows
    body_seconds: float  # of all that is computed


def no_caller(rows: int) -> Caller:
    """For a call of so many rows that asks nothing."""
    told, lengths, behind = np.zeros(rows, np.int64), np.zeros(rows, np.int64), (rows, 0)
    none = np.empty(behind, np.int64), np.empty((0, 0), np.uint64), np.full(rows, -1, np.int64)
    return Caller(0, NO_MASKS, 0, 0, told, lengths, *none)


def take_steps(
    stack: LlamaStack,
    rows: Rows,
    asked: AskedRows,
    places: Places,
    tokens: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
    most_candidates: int,
    caller: Caller | None = None,
) -> StepsTaken:
    """Up to as many steps as ``places`` have, of which ``tokens`` [N] have the first. They end
    behind one that draws one of ``stops``, where the ``caller`` says so, and before one of which
    bounds leave a row more than ``most_candidates``, or are not sure of its token."""
    from lexshard.kernels.steps import cpu  # numba compiles on first use

    embedding, shift = stack.embedding, 16
    if embedding.dtype == np.float32:
        embedding, shift = embedding.view(np.uint32), 0
    large = len(tokens) * rows.values.size > MULTIPLICATIONS_PER_THREAD
    team, size = pool.team()
    _, head_size = pool.team(worth=large)
    caller = caller or no_caller(len(tokens))
    hidden = np.empty((len(tokens), stack.shape.hidden), np.float32)
    there, seconds, drawn, found, left = cpu.take_steps(
        team,
        size,
        head_size,
        embedding,
        shift,
        float(stack.shape.embedding_scale),
        places.steps,
        tokens,
        places.first.copy(),
        places.tables,
        *stack.weights,
        *stack.shape.constants,
        stack.key_cache,
        stack.value_cache,
        *rows,
        asked.needs,
        caller.over(asked.adjustments),
        asked.top_p,
        *asked.drawing,
        stops,
        caller.answering,
        caller.masked,
        caller.fewest,
        caller.patience,
        caller.told,
        caller.lengths,
        caller.behind,
        most_candidates,
        MOST,
        hidden,
    )
    return StepsTaken(
        drawn.tolist(),
        Certified(*found),
        None if there == cpu.NOTHING else hidden,
        Certified(*left) if there == cpu.FOUND else None,
        seconds,
    )
