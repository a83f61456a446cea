"""From a head's candidates to the rows of one sampler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import CandidateRows, DecisionWork, DenseRows
from lexshard.actors.proposal import NO_TESTS
from lexshard.actors.states.row_table import RowNames


def is_dense(candidates: Candidates, vocabulary_size: int) -> list[bool]:
    """Per row whether it holds every token, none of them taken away by top-p."""
    ends = candidates.offsets.tolist()
    return [
        ends[row + 1] - ends[row] == vocabulary_size and not certificate.truncated
        for row, certificate in enumerate(candidates.certificates)
    ]


def work_of(
    step: int,
    rows: Sequence[int],
    names: RowNames,
    candidates: Candidates,
    dense: Sequence[bool],
) -> tuple[list[int], DecisionWork]:
    """``rows`` of ``candidates``, whose ``names`` are all of the step's, in the order of their
    decisions, and the work without deltas. ``dense`` is what `is_dense` says."""
    if True not in dense:
        return list(rows), DecisionWork(step, candidates=_candidate_rows(rows, names, candidates))
    chosen = [row for row in rows if not dense[row]]
    whole = [row for row in rows if dense[row]]
    work = DecisionWork(
        step,
        candidates=_candidate_rows(chosen, names, candidates) if chosen else None,
        dense=_dense_rows(whole, names, candidates) if whole else None,
    )
    return [*chosen, *whole], work


def sequences_of(work: DecisionWork) -> tuple[int, ...]:
    """The sequences of the work's rows, in order."""
    first = () if work.candidates is None else work.candidates.rows.sequences
    return first if work.dense is None else (*first, *work.dense.rows.sequences)


@cache
def _none(rows: int) -> npt.NDArray[np.bool_]:
    return np.zeros(rows, np.bool_)


def _candidate_rows(rows: Sequence[int], names: RowNames, candidates: Candidates) -> CandidateRows:
    truncated = _none(len(rows))
    if any(candidates.certificates[row].truncated for row in rows):
        truncated = np.array([candidates.certificates[row].truncated for row in rows], np.bool_)
    ids, raw, offsets = candidates.ids, candidates.raw, candidates.offsets
    if len(rows) < len(names.sequences):
        own = [slice(offsets[row], offsets[row + 1]) for row in rows]
        ids = np.concatenate([ids[each] for each in own])
        raw = np.concatenate([raw[each] for each in own])
        offsets = np.cumsum([0, *np.diff(offsets)[list(rows)]], dtype=np.int64)
        names = names.some(rows)
    # A candidate is what is left of a row that tested, and what its mask holds.
    if names.tests or names.masks:
        names = names._replace(tests=NO_TESTS, masks=())
    return CandidateRows(names, ids, raw, offsets, truncated)


def _dense_rows(rows: Sequence[int], names: RowNames, candidates: Candidates) -> DenseRows:
    size = int(candidates.offsets[rows[0] + 1] - candidates.offsets[rows[0]])
    first, last = candidates.offsets[rows[0]], candidates.offsets[rows[-1] + 1]
    if last - first == size * len(rows):  # side by side
        logits = candidates.raw[first:last].reshape(len(rows), size)
    else:
        logits = np.stack([candidates.raw[candidates.offsets[row] :][:size] for row in rows])
    return DenseRows(names.some(rows), logits)
