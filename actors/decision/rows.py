"""From a head's candidates to the rows of one sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import CandidateRows, DecisionWork, DenseRows
from lexshard.actors.proposal import NO_TESTS, GuessTest


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
    sequences: Sequence[int],
    candidates: Candidates,
    dense: Sequence[bool],
    drafted: Sequence[tuple[int, ...]] = (),
    tests: Mapping[int, GuessTest] = NO_TESTS,
) -> tuple[list[int], DecisionWork]:
    """``rows`` of ``candidates`` in the order of their decisions, and the work without deltas.

    Row ``r`` belongs to ``sequences[r]`` and assumes ``drafted[r]``, if anything is drafted;
    ``dense`` is what `is_dense` says. ``tests`` are the guesses that rows test, all dense ones.
    """
    if True not in dense:
        return list(rows), DecisionWork(
            step, candidates=_candidate_rows(rows, sequences, candidates, drafted)
        )
    chosen = [row for row in rows if not dense[row]]
    whole = [row for row in rows if dense[row]]
    work = DecisionWork(
        step,
        candidates=_candidate_rows(chosen, sequences, candidates, drafted) if chosen else None,
        dense=_dense_rows(whole, sequences, candidates, drafted, tests) if whole else None,
    )
    return [*chosen, *whole], work


def sequences_of(work: DecisionWork) -> tuple[int, ...]:
    """The sequences of the work's rows, in order."""
    first = () if work.candidates is None else work.candidates.sequences
    return first if work.dense is None else (*first, *work.dense.sequences)


@cache
def _none(rows: int) -> npt.NDArray[np.bool_]:
    return np.zeros(rows, np.bool_)


def _candidate_rows(
    rows: Sequence[int],
    sequences: Sequence[int],
    candidates: Candidates,
    drafted: Sequence[tuple[int, ...]],
) -> CandidateRows:
    truncated = _none(len(rows))
    if any(candidates.certificates[row].truncated for row in rows):
        truncated = np.array([candidates.certificates[row].truncated for row in rows], np.bool_)
    ids, raw, offsets = candidates.ids, candidates.raw, candidates.offsets
    if len(rows) < len(sequences):
        own = [slice(offsets[row], offsets[row + 1]) for row in rows]
        ids = np.concatenate([ids[each] for each in own])
        raw = np.concatenate([raw[each] for each in own])
        offsets = np.cumsum([0, *np.diff(offsets)[list(rows)]], dtype=np.int64)
    names = tuple(sequences[row] for row in rows)
    return CandidateRows(names, ids, raw, offsets, truncated, _of_rows(drafted, rows))


def _of_rows(
    drafted: Sequence[tuple[int, ...]], rows: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    return tuple(drafted[row] for row in rows) if drafted else ()


def _dense_rows(
    rows: Sequence[int],
    sequences: Sequence[int],
    candidates: Candidates,
    drafted: Sequence[tuple[int, ...]],
    tests: Mapping[int, GuessTest],
) -> DenseRows:
    size = int(candidates.offsets[rows[0] + 1] - candidates.offsets[rows[0]])
    first, last = candidates.offsets[rows[0]], candidates.offsets[rows[-1] + 1]
    if last - first == size * len(rows):  # side by side
        logits = candidates.raw[first:last].reshape(len(rows), size)
    else:
        logits = np.stack([candidates.raw[candidates.offsets[row] :][:size] for row in rows])
    names = tuple(sequences[row] for row in rows)
    return DenseRows(
        names,
        logits.T,
        drafted=_of_rows(drafted, rows),
        tests=tuple(tests.get(row) for row in rows) if tests else (),
    )
