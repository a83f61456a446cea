"""Guesses tested by bounds: what is decided is what every logit would have decided."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.verify import (
    OPEN,
    REPLACED,
    STANDS,
    BoundedRow,
    DenseProposals,
    DraftedRows,
    ProposedGuess,
    replacement,
    try_guess,
    verify,
)
from lexshard.kernels.verify.reference import acceptance, log_softmax
from tests.support.decision_cases import FLAVOURS, random_logits

KINDS = ("certain", "list", "close", "equal", "edge")
WIDTHS = (0.0, 1e-5, 1e-3, 0.1, 1.0)


class Case:
    """One row of ``size`` logits and a guess drawn from a proposal of ``kind``."""

    def __init__(self, seed: int, size: int, flavour: str, kind: str) -> None:
        random = np.random.default_rng(seed)
        self.random = random
        self.logits = random_logits(random, flavour, 1, size)[0]
        self.scale = float(np.float32(1 / random.choice([1.0, 0.7, 4.0, 0.05])))
        key, position = int(random.integers(0, 2**63)), int(random.integers(0, 2**31))
        proposed = self.logits + (0.3 * random.standard_normal(size)).astype(np.float32)
        if kind == "equal":
            proposed = self.logits.copy()
        if kind in ("list", "edge"):
            proposed[random.random(size) < 0.6] = -np.inf
        own = self.scale if kind == "equal" else 1.1
        proposed[~np.isfinite(proposed)] = -np.inf
        if not np.isfinite(proposed).any():
            kind = "certain"
        with np.errstate(invalid="ignore"):
            token = int(np.argmax(proposed.astype(np.float64) * own + random.gumbel(size=size)))
        if kind == "edge":
            proposed[token] = self._edge(proposed, token, own, key, position)
        if kind == "certain":
            token, proposed = int(random.integers(0, size)), proposed[:0]
        total = 0.0
        if len(proposed):
            total = float(np.logaddexp.reduce(proposed.astype(np.float64) * own))
        self.guess = ProposedGuess(token, proposed, own, total, key, position)

    def _edge(
        self, proposed: np.ndarray, token: int, own: float, key: int, position: int
    ) -> np.float32:
        """The proposal's logit with which ``p / q`` of the token is ``u``, but for a rounding."""
        with np.errstate(invalid="ignore"):
            log_p = float(log_softmax(self.logits, self.scale)[token])
        wanted = log_p - math.log(acceptance(key, position)[0])
        others = np.delete(proposed, token).astype(np.float64) * own
        if not -50 < wanted < -1e-6 or not len(others) or not np.isfinite(others).any():
            return np.float32(proposed[token])
        log_odds = wanted - math.log1p(-math.exp(wanted))
        return np.float32((log_odds + float(np.logaddexp.reduce(others))) / own)

    def emitted(self) -> int:
        """What every logit decides."""
        guess = self.guess
        rows = DraftedRows(
            np.array([guess.token]),
            np.array([self.scale]),
            np.array([guess.key], np.uint64),
            np.array([guess.position], np.uint64),
        )
        proposals = None
        if len(guess.logits):
            scales = np.array([guess.inverse_temperature])
            proposals = DenseProposals(guess.logits[None], scales)
        verdict = verify(self.logits[None], rows, proposals=proposals)
        return int(verdict.tokens[0])

    def bounds(self, width: float, shift: float = 0.0) -> BoundedRow:
        """Bounds ``width`` apart, rounded outward; wrong ones where they are shifted."""
        logits, share = self.logits, self.random.random(len(self.logits))
        with np.errstate(invalid="ignore"):
            lower = (logits - width * share + shift * self.random.random(len(logits))).astype(
                np.float32
            )
            upper = (logits + width * (1 - share)).astype(np.float32)
        lower = np.nextafter(lower, np.float32(-np.inf)) if not shift else lower
        upper = np.maximum(np.nextafter(upper, np.float32(np.inf)), lower)
        upper[logits == -np.inf] = -np.inf
        lower[logits == -np.inf] = -np.inf
        token = self.guess.token
        lower[token] = upper[token] = logits[token]
        return BoundedRow(lower, upper, self.scale)

    def decided(self, row: BoundedRow) -> int | None:
        """What the bounds decide, None where they do not."""
        finding = try_guess(row, self.guess)
        if finding.outcome == OPEN:
            return None
        if finding.outcome == STANDS:
            return self.guess.token
        assert finding.outcome == REPLACED
        token = replacement(self.logits[finding.ids], finding, row, self.guess)
        assert self.emitted() in finding.ids
        if len(finding.ids) == 1:
            return int(finding.ids[0])
        return None if token < 0 else token


@settings(max_examples=150)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 7, 64, 65, 200, 1000]),
    st.sampled_from(FLAVOURS),
    st.sampled_from(KINDS),
    st.sampled_from(WIDTHS),
)
def test_what_bounds_decide_every_logit_decides(
    seed: int, size: int, flavour: str, kind: str, width: float
) -> None:
    case = Case(seed, size, flavour, kind)
    assert case.decided(case.bounds(width)) in (None, case.emitted())


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_bounds_decide_nearly_everything(kind: str) -> None:
    """But what stands at the edge itself."""
    cases = [Case(seed, 4200, "plain", kind) for seed in range(40)]
    decided = [case.decided(case.bounds(1e-5)) for case in cases]
    left = sum(token is None for token in decided)
    assert left > 30 if kind == "edge" else left <= 2
    for case, token in zip(cases, decided, strict=True):
        assert token in (None, case.emitted())


def test_bounds_that_do_not_hold_are_noticed() -> None:
    wrong = 0
    for seed in range(200):
        case = Case(seed, 300, "plain", "close")
        finding = try_guess(case.bounds(0.0, shift=1.0), case.guess)
        stood = case.emitted() == case.guess.token
        wrong += finding.outcome == (REPLACED if stood else STANDS)
    assert wrong > 5
