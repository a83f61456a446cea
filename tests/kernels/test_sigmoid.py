"""Verification with sigmoids: the reference's tokens everywhere, and how wrong these are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.kernels.verify import DenseProposals, DraftedRows, reference, verify
from lexshard.kernels.verify.reference import sigmoid_weights
from tests.support.decision_cases import FLAVOURS, random_logits
from tests.support.verify_cases import Chains, proposals_for, random_rows, softmax

LIMITS = [(-1.0, 1.0), (-10.0, 10.0), (-1e3, 1e3), (-1e4, 1e4)]
FALSE_ALARM = 1e-4  # of each statistical check; seeds are fixed


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 7, 64, 65, 300, 4097, 12_345]),
    flavour=st.sampled_from(FLAVOURS),
    kind=st.sampled_from(["dense", "close", "equal"]),
    limits=st.sampled_from(LIMITS),
)
def test_cpu_gives_the_reference_tokens(
    seed: int, size: int, flavour: str, kind: str, limits: tuple[float, float]
) -> None:
    random = np.random.default_rng(seed)
    rows = random_rows(random, 6, size)
    logits = random_logits(random, flavour, 6, size)
    rows, proposals = proposals_for(random, kind, logits, rows)
    arguments = {"proposals": proposals, "sigmoid": limits}
    expected = reference.verify(logits, rows, **arguments)  # type: ignore[arg-type]
    found = verify(logits, rows, **arguments)  # type: ignore[arg-type]
    assert found.tokens.tolist() == expected.tokens.tolist()


def _law(p: np.ndarray, weights: np.ndarray, q: np.ndarray, proposed: np.ndarray) -> np.ndarray:
    """What is emitted where drafts from ``q`` are tested with the weights of target and drafter."""
    stands = np.minimum(1.0, weights / proposed)
    left = np.maximum(0.0, weights - proposed)
    left = left if left.any() else weights
    return np.asarray(q * stands + (q * (1 - stands)).sum() * left / left.sum())


def _emitted(chains: Chains, limits: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """The law of the first token by the formula, and the target's."""
    target, drafter = chains.target[0], chains.drafter[0]
    weights = [sigmoid_weights(each, 1.0, limits) for each in (target, drafter)]
    return _law(softmax(target), weights[0], softmax(drafter), weights[1]), softmax(target)


@pytest.mark.parametrize("limits", LIMITS[1:3])
def test_the_kernel_emits_what_the_formula_says(limits: tuple[float, float]) -> None:
    chains = Chains(30, 8, 10_000)
    count = len(chains.keys)
    before = np.zeros(count, np.int64)
    drafts, proposed = chains.draft("dense", before, 1)
    rows = DraftedRows(drafts, np.ones(count), chains.keys, np.ones(count, np.uint64))
    proposals = DenseProposals(proposed, np.ones(count))
    found = verify(chains.target[before], rows, proposals=proposals, sigmoid=limits)
    observed = np.bincount(found.tokens, minlength=chains.size)
    law, _ = _emitted(chains, limits)
    assert stats.chisquare(observed, count * law).pvalue > FALSE_ALARM


def test_its_error_is_what_it_is() -> None:
    """Total variation from the target, of one token, on a pair whose own distance is 0.449.

    The wider the limits, the nearer the output is to the drafter's own: nothing is verified.
    """
    chains = Chains(30, 8, 1)
    own = 0.5 * np.abs(softmax(chains.target[0]) - softmax(chains.drafter[0])).sum()
    errors = []
    for limits in LIMITS:
        law, target = _emitted(chains, limits)
        assert law.sum() == pytest.approx(1)
        errors.append(0.5 * np.abs(law - target).sum())
    assert own == pytest.approx(0.449, abs=5e-4)
    assert errors == pytest.approx([0.410, 0.443, 0.449, 0.449], abs=5e-4)


def test_the_papers_limits_make_all_weights_alike() -> None:
    logits = np.linspace(-40, 40, 100, dtype=np.float32)
    weights = sigmoid_weights(logits, 1.0, (-1e4, 1e4))
    assert weights.min() > 0.6219
    assert weights.max() < 0.6230
