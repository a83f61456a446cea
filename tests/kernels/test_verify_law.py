"""What verification emits has the target's own law, whatever the drafter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.verify import DenseProposals, DraftedRows, cpu, verify
from lexshard.kernels.verify.reference import acceptance
from tests.support.verify_cases import Chains, softmax

FALSE_ALARM = 1e-4  # of each statistical check; seeds are fixed


def _acceptance(key: int, position: int) -> tuple[float, int]:
    uniform, residual_key = cpu.acceptance(np.uint64(key), np.uint64(position))
    return float(uniform), int(residual_key)


def test_acceptance_uniforms_are_uniform_and_strangers_to_the_noise() -> None:
    draws = [_acceptance(11, position) for position in range(20_000)]
    uniform = np.array([each for each, _ in draws])
    assert stats.kstest(uniform, "uniform").pvalue > FALSE_ALARM
    for key, position in ((11, 5), (2**64 - 1, 2**32 - 1)):
        expected = acceptance(key, position)
        assert _acceptance(key, position) == expected
    # The plain noise, the residual's noise and the uniform of a row: no two correlate.
    plain = np.array([gumbel_row(11, position, 1)[0] for position in range(20_000)])
    other = np.array([gumbel_row(key, place, 1)[0] for place, (_, key) in enumerate(draws)])
    limit = stats.norm.isf(FALSE_ALARM / 6) / math.sqrt(len(plain))
    correlations = np.corrcoef([uniform, plain, other])[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < limit


@pytest.mark.parametrize("kind", ["certain", "few", "dense"])
def test_chains_follow_the_target_whatever_the_drafter(kind: str) -> None:
    """Three tokens from rounds of two drafts, drawn with the very noise that draws plain tokens.

    Chi-square over all chains of three, at 1e-4; and the share of first drafts that stand is 1 - TV
    of the two laws, within 4 standard errors (6e-5).
    """
    chains = Chains(20, 4, 12_000)
    count = len(chains.keys)
    tokens = np.zeros((count, 8), np.int64)  # position 0: every chain begins with token 0
    lengths = np.ones(count, np.int64)
    first_stands = None
    while lengths.min() < 4:
        open_chains = np.flatnonzero(lengths < 4)
        for length in np.unique(lengths[open_chains]):
            group = open_chains[lengths[open_chains] == length]
            some = chains.part(group)
            before = tokens[group, length - 1]
            one, logits_one = some.draft(kind, before, int(length))
            two, logits_two = some.draft(kind, one, int(length) + 1)
            target = np.stack([chains.target[each] for each in (before, one, two)], axis=1)
            proposed = np.stack([logits_one, logits_two], axis=1).reshape(-1, chains.size)
            drafts = np.stack([one, two], axis=1)
            rows = DraftedRows(
                drafts.ravel(),
                np.ones(2 * len(group)),
                some.keys.repeat(2),
                np.tile(np.array([length, length + 1], np.uint64), len(group)),
            )
            dense = DenseProposals(proposed, np.ones(len(proposed)))
            found = verify(
                target[:, :2].reshape(-1, chains.size),
                rows,
                proposals=None if kind == "certain" else dense,
            )
            # The token after two drafts that stand is drawn plainly.
            bonus = (target[:, 2] + some.noise(int(length) + 2)).argmax(axis=1)
            emitted = np.column_stack([found.tokens.reshape(-1, 2), bonus])
            stands = (emitted[:, :2] == drafts).cumprod(axis=1)
            if first_stands is None:
                first_stands = stands[:, 0].mean()
            for place, chain in enumerate(group):
                own = emitted[place, : stands[place].sum() + 1]
                tokens[chain, length : length + len(own)] = own
                lengths[chain] = length + len(own)
    law = softmax(chains.target)
    expected = law[0][:, None, None] * law[:, :, None] * law[None, :, :]
    observed = np.zeros_like(expected)
    np.add.at(observed, tuple(tokens[:, 1:4].T), 1)
    assert stats.chisquare(observed.ravel(), count * expected.ravel()).pvalue > FALSE_ALARM
    proposal = softmax(chains.draft(kind, np.zeros(1, np.int64), 0)[1])[0]
    if kind == "certain":
        proposal = np.eye(chains.size)[proposal.argmax()]
    rate = np.minimum(law[0], proposal).sum()
    assert abs(first_stands - rate) < 4 * math.sqrt(rate * (1 - rate) / count)


def test_coupled_drafts_match_as_often_as_the_formula_says() -> None:
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) for a drafter that shares the noise; within 4
    standard errors (6e-5)."""
    chains = Chains(21, 12, 12_000)
    count = len(chains.keys)
    before = np.zeros(count, np.int64)
    drafts, _ = chains.draft("dense", before, 1)
    drawn = (chains.target[before] + chains.noise(1)).argmax(axis=1)  # as plain decoding draws
    p, q = softmax(chains.target[0]), softmax(chains.drafter[0])
    rate = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(axis=1)).sum()
    assert abs((drawn == drafts).mean() - rate) < 4 * math.sqrt(rate * (1 - rate) / count)
