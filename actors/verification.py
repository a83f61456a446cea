"""Guesses tested by distributions: whether one stands, and what is drawn in its place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.actors.proposal import GuessTest
from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import Adjustments, adjust, select_rows
from lexshard.kernels.truncate import truncate
from lexshard.kernels.verify import DenseProposals, DraftedRows, verify


def emitted_tokens(
    logits: npt.NDArray[np.float32],
    tests: Sequence[GuessTest],
    controls: Controls,
    min_p: Sequence[float],
    adjustments: Adjustments,
    sigmoid: tuple[float, float] | None = None,
) -> npt.NDArray[np.int64]:
    """The token that each row of ``logits`` [B, V] emits if the guesses before it stand: the one
    it tests, or what replaces it; -1 where every token is excluded.

    Raw logits are adjusted and truncated as `kernels.decision.decide_dense` does before it draws.
    No temperature is 0. ``sigmoid`` are alpha and beta of the tests that are not exact.
    """
    alike: dict[tuple[bool, bool], list[int]] = {}
    for row, test in enumerate(tests):
        alike.setdefault((test.exactly, test.proposal is None), []).append(row)
    tokens = np.empty(len(tests), np.int64)
    for (exactly, certain), rows in alike.items():
        if certain and not exactly:
            raise ValueError("sigmoids need what guesses were drawn from: this drafter is certain")
        target = np.empty((len(rows), logits.shape[1]), np.float32)
        for place, row in enumerate(rows):
            adjusted = _adjusted(logits[row], row, adjustments)
            target[place] = _truncated(adjusted, row, controls, min_p[row])
        own = [tests[row] for row in rows]
        drafted = DraftedRows(
            drafts=np.array([test.token_id for test in own], np.int64),
            inverse_temperature=controls.inverse_temperature[rows],
            key=controls.key[rows],
            position=controls.position[rows],
        )
        proposals = None if certain else _dense_proposals(own, logits.shape[1])
        limits = None if exactly else sigmoid
        tokens[rows] = verify(target, drafted, proposals=proposals, sigmoid=limits).tokens
    return tokens


def _adjusted(
    logits: npt.NDArray[np.float32], row: int, adjustments: Adjustments
) -> npt.NDArray[np.float32]:
    if not adjustments.active[row]:
        return logits
    ids, ends = np.arange(len(logits), dtype=np.int32), np.array([0, len(logits)], np.int64)
    return adjust(ids, logits, ends, select_rows(adjustments, row, row + 1))


def _truncated(
    logits: npt.NDArray[np.float32], row: int, controls: Controls, min_p: float
) -> npt.NDArray[np.float32]:
    """``-inf`` where a token does not stay in the draw."""
    top_k, top_p = int(controls.top_k[row]), float(controls.top_p[row])
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        return logits
    stays = truncate(
        logits,
        inverse_temperature=float(controls.inverse_temperature[row]),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    return np.where(stays, logits, np.float32(-np.inf))


def _dense_proposals(tests: Sequence[GuessTest], size: int) -> DenseProposals:
    """What the guesses were drawn from; of each it is known."""
    proposals = [test.proposal for test in tests if test.proposal is not None]
    logits = np.full((len(proposals), size), -np.inf, np.float32)
    for row, proposal in enumerate(proposals):
        logits[row, proposal.ids] = proposal.logits
    scales = np.array([proposal.inverse_temperature for proposal in proposals], np.float64)
    return DenseProposals(logits, scales)
