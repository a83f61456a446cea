"""Verification: the reference's tokens from every implementation, and the target's own law."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.kernels import pool
from lexshard.kernels.block_maxima import block_maxima
from lexshard.kernels.exponential.bounded_sum import relative_error
from lexshard.kernels.verify import (
    DenseProposals,
    DraftedRows,
    cpu,
    normalizer,
    race,
    reference,
    sigmoid,
    verify,
)
from lexshard.kernels.verify.reference import acceptance
from tests.support.decision_cases import FLAVOURS, random_logits
from tests.support.verify_cases import KINDS, proposals_for, random_rows, softmax

FALSE_ALARM = 1e-4  # of each statistical check; seeds are fixed


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 7, 64, 65, 200, 1000, 4097, 12_345]),
    flavour=st.sampled_from(FLAVOURS),
    kind=st.sampled_from(KINDS),
)
def test_cpu_gives_the_reference_tokens(seed: int, size: int, flavour: str, kind: str) -> None:
    random = np.random.default_rng(seed)
    rows = random_rows(random, 6, size)
    logits = random_logits(random, flavour, 6, size)
    rows, proposals = proposals_for(random, kind, logits, rows)
    expected = reference.verify(logits, rows, proposals, None)
    assert verify(logits, rows, proposals=proposals).tokens.tolist() == expected.tokens.tolist()


def _acceptance(key: int, position: int) -> tuple[float, int]:
    uniform, residual_key = cpu.acceptance(np.uint64(key), np.uint64(position))
    return float(uniform), int(residual_key)


def _one(draft: int, position: int = 0, key: int = 7) -> DraftedRows:
    return DraftedRows(
        np.array([draft], np.int64),
        np.ones(1),
        np.array([key], np.uint64),
        np.array([position], np.uint64),
    )


@pytest.mark.parametrize("module", [reference, cpu])
def test_a_draft_of_the_target_itself_always_stands(module: ModuleType) -> None:
    """p = q up to a shift of the logits: not one of 2,000 drafts may fall to rounding."""
    random = np.random.default_rng(0)
    rows = random_rows(random, 2000, 50)._replace(inverse_temperature=np.ones(2000))
    logits = (3 * random.standard_normal((2000, 50))).astype(np.float32)
    rows, proposals = proposals_for(random, "equal", logits, rows)
    found = module.verify(logits, rows, proposals, None)
    assert found.tokens.tolist() == rows.drafts.tolist()


@pytest.mark.parametrize("module", [reference, cpu])
def test_what_the_target_excludes_is_rejected_and_never_drawn(module: ModuleType) -> None:
    logits = np.zeros((1, 9), np.float32)
    logits[0, [0, 4, 5]] = -np.inf
    for position in range(200):
        found = module.verify(logits, _one(4, position), None, None)
        assert found.tokens[0] not in (0, 4, 5, -1)
    nothing = np.full((1, 9), -np.inf, np.float32)
    assert module.verify(nothing, _one(4), None, None).tokens.tolist() == [-1]


def test_a_residual_holds_what_the_proposal_lacks() -> None:
    """q is zero on half of the target's mass: a rejection draws from that half alone."""
    logits = np.zeros((1, 8), np.float32)
    proposed = np.full((1, 8), -np.inf, np.float32)
    proposed[0, :4] = np.log([0.625, 0.125, 0.125, 0.125])
    proposals = DenseProposals(proposed, np.ones(1))
    tokens = [
        int(verify(logits, _one(0, position), proposals=proposals).tokens[0])
        for position in range(600)
    ]
    counts = np.bincount(tokens, minlength=8)
    assert counts[1:4].sum() == 0
    assert stats.chisquare(counts[4:]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("side", [-2e-6, 2e-6])
@pytest.mark.parametrize("module", [reference, cpu])
def test_what_the_fast_normaliser_leaves_open_is_decided_exactly(
    side: float, module: ModuleType
) -> None:
    """u is a few millionths away from p / q: a margin of 2.5e-5 decides nothing here."""
    random = np.random.default_rng(3)
    logits = (2 * random.standard_normal((1, 700))).astype(np.float32)
    p = softmax(logits[0])
    tested = 0
    for position in range(400):
        uniform, _ = acceptance(7, position)
        draft = int(p.argmax())
        q = p[draft] / uniform * (1 - side)
        if q < 1:
            proposed = np.full((1, 700), -np.inf, np.float32)
            proposed[0, [draft, (draft + 1) % 700]] = math.log(q / (1 - q)), 0.0
            ratio = p[draft] / softmax(proposed[0])[draft] / uniform
            if not 1e-7 < abs(ratio - 1) < 1e-5 or (ratio > 1) != (side > 0):
                continue  # its logit was rounded too far
            found = module.verify(
                logits, _one(draft, position), DenseProposals(proposed, np.ones(1)), None
            )
            assert (found.tokens[0] == draft) == (side > 0)
            tested += 1
    assert tested > 100


def test_the_margins_are_above_the_error_of_a_sum() -> None:
    error = relative_error(normalizer.CHUNK, 0.0)
    assert -math.log1p(-error) < normalizer.LOG_MARGIN
    per_unit = relative_error(normalizer.CHUNK, 1 / math.log(2.0)) - error
    assert per_unit < normalizer.TOP_MARGIN


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    flavour=st.sampled_from([each for each in FLAVOURS if each != "special"]),
    size=st.sampled_from([1, 65, 1000, 20_000]),
    scale=st.sampled_from([2.0**-20, 0.3, 1.0, 50.0, 2.0**20]),
)
def test_the_fast_normaliser_keeps_its_margin(
    seed: int, flavour: str, size: int, scale: float
) -> None:
    random = np.random.default_rng(seed)
    logits = random_logits(random, flavour, 1, size)[0]
    shift, total = normalizer.fast_total(logits, scale, logits[random.integers(size)])
    if normalizer.is_bounded(shift, scale):
        top = float(shift) * math.log(2.0)
        distances = logits.astype(np.float64) * scale - top
        highest = distances.max()
        expected = highest + math.log(np.exp(distances - highest).sum())
        margin = normalizer.LOG_MARGIN + normalizer.TOP_MARGIN * abs(top)
        assert abs(math.log(total) - expected) < margin


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_block_maxima_are_those_of_every_64_logits(size: int) -> None:
    logits = random_logits(np.random.default_rng(size), "special", 1, size)[0]
    maxima = np.empty(-(-size // 64), np.float32)
    highest = block_maxima(logits, maxima)
    padded = np.pad(logits, (0, -size % 64), constant_values=-np.inf)
    assert np.array_equal(maxima, padded.reshape(-1, 64).max(axis=1))
    assert highest == logits.max()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["certain", "close"])
def test_a_row_does_not_depend_on_its_batch(threads: int, kind: str) -> None:
    random = np.random.default_rng(8)
    rows = random_rows(random, 12, 200)
    logits = random_logits(random, "plain", 12, 200)
    rows, proposals = proposals_for(random, kind, logits, rows)
    pool.set_threads(threads)
    try:
        together = verify(logits, rows, proposals=proposals)
    finally:
        pool.set_threads(1)
    for row in range(12):
        own = slice(row, row + 1)
        alone = DraftedRows(*(each[own] for each in rows))
        if isinstance(proposals, DenseProposals):
            some = DenseProposals(proposals.logits[own], proposals.inverse_temperature[own])
            found = verify(logits[own], alone, proposals=some)
        else:
            found = verify(logits[own], alone)
        assert found.tokens[0] == together.tokens[row]


def test_of_a_proposal_only_what_decides_is_read() -> None:
    """Two uniform laws over 40,000 tokens, and a draft that is half of both: with u below p = 1/2
    nothing of the proposal matters; above, the share of its denominator that makes q < p / u."""
    size = 40_000
    logits = np.zeros((1, size), np.float32)
    logits[:, 7] = math.log(size - 1)
    proposals = DenseProposals(logits.copy(), np.ones(1))
    read = {}
    for position in range(60):
        uniform, _ = acceptance(7, position)
        found = verify(logits, _one(7, position), proposals=proposals)
        assert found.tokens.tolist() == [7]
        read[uniform] = int(found.logits_read[0]) - size
    for uniform, some in read.items():
        share = max(0.0, 2 * uniform - 1)
        assert share * size <= some + normalizer.CHUNK
        assert some <= share * size + 2 * normalizer.CHUNK
    assert min(read.values()) == 0 < max(read.values())


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("where", ["first", "last", "both"])
def test_a_row_that_grows_far_beyond_its_draft_is_normalised(where: str, scale: float) -> None:
    """The draft's own logit is what weights are relative to until they become too large."""
    random = np.random.default_rng(4)
    logits = random.standard_normal((1, 9000)).astype(np.float32)
    logits[:, 5000] = -90.0
    if where != "last":
        logits[:, 10] = 60.0
    if where != "first":
        logits[:, 8990] = 61.0
    logits[:, 3000:3100] = -np.inf
    for position in range(20):
        rows = _one(5000 if position % 2 else 10, position)
        rows = rows._replace(inverse_temperature=np.full(1, scale))
        proposed = np.roll(logits, 1, axis=1) if position % 3 else logits.copy()
        proposals = DenseProposals(proposed, np.ones(1))
        expected = reference.verify(logits, rows, proposals, None)
        found = verify(logits, rows, proposals=proposals)
        assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("margin", [1e-5, 1e-2, 0.3])
def test_a_certain_draw_does_not_depend_on_normalisers_within_their_margins(margin: float) -> None:
    """Any of them gives the token of the true ones where a race says so, which it hardly ever
    does not where margins are small, and often does not where they are large."""
    random = np.random.default_rng(6)
    certain_draws = 0
    for trial in range(100):
        p, q = (2 * random.standard_normal((2, 300))).astype(np.float32)
        found = []
        for error in (0.0, margin):
            totals = np.log(np.exp(np.array([p, q], np.float64)).sum(axis=1))
            totals += error * random.uniform(-1, 1, 2)
            row, proposed = (
                race.ScaledRow(each, 1.0, 0.0, float(total))
                for each, total in zip((p, q), totals, strict=True)
            )
            maxima = np.empty(5, np.float32)
            block_maxima(p, maxima)
            found.append(
                race.race(
                    row,
                    race.ProposedRow(race.DENSE, 0, proposed),
                    maxima,
                    np.empty(5),
                    (error, error),
                    np.uint64(trial),
                    np.uint64(trial),
                )
            )
        (true, _), (token, certain) = found
        assert token == true or not certain
        certain_draws += certain
    assert certain_draws >= 99 if margin == 1e-5 else certain_draws < 99


def test_the_interpreter_lock_is_released() -> None:
    for module in (cpu, race, normalizer, sigmoid):
        kernels = [each for each in vars(module).values() if hasattr(each, "targetoptions")]
        assert kernels
        assert all(each.targetoptions.get("nogil") for each in kernels)


def test_what_does_not_fit_is_refused() -> None:
    logits = np.zeros((2, 10), np.float32)
    rows = DraftedRows(np.array([1, 2]), np.ones(2), np.zeros(2, np.uint64), np.zeros(2, np.uint64))
    dense = DenseProposals(np.zeros((2, 10), np.float32), np.ones(2))
    verify(logits, rows, proposals=dense)
    wrong = [
        ("float32", {"logits": logits.astype(np.float64)}),
        ("contiguous", {"logits": np.zeros((10, 2), np.float32).T}),
        ("3 rows need one", {"logits": np.zeros((3, 10), np.float32)}),
        ("do not fit a vocabulary", {"rows": rows._replace(drafts=np.array([1, 10]))}),
        ("need one draft", {"rows": rows._replace(key=np.zeros(3, np.uint64))}),
        ("finite", {"rows": rows._replace(inverse_temperature=np.array([1, np.inf]))}),
        ("above 0", {"rows": rows._replace(inverse_temperature=np.array([1.0, 0.0]))}),
        ("32 bits", {"rows": rows._replace(position=np.array([0, 2**32], np.uint64))}),
        ("for each of 2", {"proposals": replace(dense, logits=np.zeros((3, 10), np.float32))}),
        ("above 0", {"proposals": replace(dense, inverse_temperature=np.zeros(2))}),
        ("for each row", {"proposals": replace(dense, inverse_temperature=np.ones(1))}),
        ("dense proposals", {"sigmoid": (-1.0, 1.0)}),
        *(
            ("below 0", {"proposals": dense, "sigmoid": limits})
            for limits in ((1.0, 2.0), (-1.0, 0.0), (-np.inf, 1.0))
        ),
    ]
    for message, changes in wrong:
        arguments = {"logits": logits, "rows": rows, **changes}
        given_logits, given_rows = arguments.pop("logits"), arguments.pop("rows")
        with pytest.raises(ValueError, match=message):
            verify(given_logits, given_rows, **arguments)  # type: ignore[arg-type]
