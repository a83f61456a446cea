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
    sigmoid: tuple[float, float] | None,
) -> npt.NDArray[np.int64]:
    """The token that each column of ``logits`` [V, B] emits if the guesses before it stand: the one
    it tests, or what replaces it; -1 where every token is excluded.

    Raw logits are adjusted and truncated as `kernels.decision.decide_dense` does before it draws.
    No temperature is 0. ``sigmoid`` are alpha and beta where sigmoids test, else None.
    """
    size, columns = logits.shape
    target = np.empty((columns, size), np.float32)
    for column in range(columns):
        adjusted = _adjusted(logits[:, column], column, adjustments)
        target[column] = _truncated(adjusted, column, controls, min_p[column])
    rows = DraftedRows(
        drafts=np.array([test.token_id for test in tests], np.int64),
        inverse_temperature=controls.inverse_temperature,
        key=controls.key,
        position=controls.position,
    )
    proposals = _dense_proposals(tests, size)
    if sigmoid is not None and proposals is None:
        raise ValueError("sigmoids need what guesses were drawn from: this drafter is certain")
    return verify(target, rows, proposals=proposals, sigmoid=sigmoid).tokens


def _adjusted(
    raw: npt.NDArray[np.float32], row: int, adjustments: Adjustments
) -> npt.NDArray[np.float32]:
    logits = np.ascontiguousarray(raw)
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


def _dense_proposals(tests: Sequence[GuessTest], size: int) -> DenseProposals | None:
    """None where the drafter, which is the same of all rows, was certain."""
    proposals = [test.proposal for test in tests if test.proposal is not None]
    if len(proposals) < len(tests):
        return None
    logits = np.full((len(proposals), size), -np.inf, np.float32)
    for row, proposal in enumerate(proposals):
        logits[row, proposal.ids] = proposal.logits
    scales = np.array([proposal.inverse_temperature for proposal in proposals], np.float64)
    return DenseProposals(logits, scales)
