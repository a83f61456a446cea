"""Rows that test a guess by distributions, decided without all of their logits.

Such a row emits its guess or one other token (`kernels.verify`). Where bounds on its
logits tell which (`kernels.verify`), or the few tokens that truncation leaves, that token
is the only one that can still win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.rescoring import Rescorer
from lexshard.actors.head.screens import ScreenedRows
from lexshard.actors.head.softmax.whole_softmax import Mass
from lexshard.actors.proposal import GuessTest, Proposal
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.actors.verification import emitted_tokens
from lexshard.kernels.mass import adjusted_bounds
from lexshard.kernels.verify import (
    OPEN,
    STANDS,
    BoundedRow,
    ProposedGuess,
    replacement,
    try_guess,
)

NO_LOGITS = np.empty(0, np.float32)


def decide_guesses(
    screened: ScreenedRows,
    rows: Sequence[int],
    rescorer: Rescorer,
    hidden: npt.NDArray[np.float32],
    asked: RowTable,
    *,
    precisely: bool = False,
) -> dict[int, Mass]:
    """The one token that each of ``rows`` emits, which are ``asked`` to test a guess, and what it
    took; those are missing of which the bounds of ``screened``, the dense screen's where
    ``precisely``, tell too little. The rows of ``rescorer`` are the whole vocabulary."""
    place = {row: index for index, row in enumerate(screened.rows.tolist())}
    found: dict[int, Mass] = {}
    for row in rows:
        if not screened.known[place[row]]:
            continue
        estimates, _, adjustments = screened.one_row(place[row])
        exact = partial(rescorer.of_row, hidden[row : row + 1], adjustments)
        bounds = adjusted_bounds(estimates, rescorer.size, adjustments)
        emitted, rescored = _emitted(bounds, exact, asked.need(row))
        if emitted is not None:
            found[row] = Mass(np.array([emitted], np.int32), rescored, precisely)
    return found


def decide_by_candidates(
    candidates: Candidates,
    asked: RowTable,
    tests: Mapping[int, GuessTest],
    vocabulary_size: int,
) -> Candidates:
    """``candidates`` with the one token that each row of ``tests`` emits, or none, where they are
    all that truncation can leave of the row: what is no candidate has no probability."""
    offsets = candidates.offsets
    truncated = [certificate.truncated for certificate in candidates.certificates]
    rows = [
        row
        for row in tests
        if asked.kinds[row] != "dense"
        and (truncated[row] or offsets[row + 1] - offsets[row] < vocabulary_size)
    ]
    if not rows:
        return candidates
    parts = [slice(*offsets[row : row + 2]) for row in range(len(asked))]
    logits = np.full((len(rows), vocabulary_size), -np.inf, np.float32)
    for index, row in enumerate(rows):
        logits[index, candidates.ids[parts[row]]] = candidates.raw[parts[row]]
    chosen = asked.some(rows)
    controls = chosen.controls._replace(
        # Of a nucleus, all tokens stay.
        top_p=np.where([truncated[row] for row in rows], 1.0, chosen.controls.top_p),
        log_min_p=np.full(len(rows), -np.inf),
    )
    own_tests, min_p = [tests[row] for row in rows], chosen.min_p.tolist()
    tokens = emitted_tokens(logits, own_tests, controls, min_p, chosen.flat)
    ids = [candidates.ids[part] for part in parts]
    raw = [candidates.raw[part] for part in parts]
    for index, row in enumerate(rows):
        emitted = tokens[index : index + 1]
        ids[row] = emitted[emitted >= 0].astype(np.int32)
        raw[row] = logits[index, ids[row]]
    return replace(
        candidates,
        ids=np.concatenate(ids),
        raw=np.concatenate(raw),
        offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
    )


def _emitted(
    bounds: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    exact: Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]],
    need: Need,
) -> tuple[int | None, int]:
    """The token that a row emits, None where its bounds are too loose, and how many ``exact``
    logits were computed."""
    assert need.guess is not None
    lower, upper = bounds
    token = need.guess.token_id
    lower[token] = upper[token] = exact(np.array([token], np.int32))[0]
    row = BoundedRow(lower, upper, need.inverse_temperature)
    guess = _proposed(need, need.guess, len(upper))
    finding = try_guess(row, guess)
    if finding.outcome == OPEN:
        return None, 1
    if finding.outcome == STANDS:
        return token, 1
    if len(finding.ids) == 1:
        return int(finding.ids[0]), 1
    found = replacement(exact(finding.ids), finding, row, guess)
    return None if found < 0 else found, 1 + len(finding.ids)


def _proposed(need: Need, test: GuessTest, size: int) -> ProposedGuess:
    proposal = test.proposal
    if proposal is None:
        return ProposedGuess(test.token_id, NO_LOGITS, 1.0, 0.0, need.key, need.position)
    logits = np.full(size, -np.inf, np.float32)
    logits[proposal.ids] = proposal.logits
    scale = proposal.inverse_temperature
    return ProposedGuess(
        test.token_id, logits, scale, _log_total(proposal), need.key, need.position
    )


def _log_total(proposal: Proposal) -> float:
    scaled = proposal.logits.astype(np.float64) * proposal.inverse_temperature
    top = float(scaled.max())
    return top + math.log(float(np.exp(scaled - top).sum()))
