"""Verification: the reference's tokens from every implementation, and the target's own law."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.kernels import pool
from lexshard.kernels.draw import Controls, draw
from lexshard.kernels.exponential.bounded_sum import relative_error
from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.truncate import truncate
from lexshard.kernels.verify import (
    DenseProposals,
    DraftedRows,
    SparseProposals,
    cpu,
    normalizer,
    race,
    verify,
)
from lexshard.kernels.verify.reference import acceptance
from tests.support.decision_cases import FLAVOURS, random_logits
from tests.support.verify_cases import (
    KINDS,
    assert_same,
    proposals_for,
    random_rows,
    rows_with_drafts,
    softmax,
)

settings.register_profile("verify", deadline=None)
settings.load_profile("verify")

SIZES = [1, 2, 7, 64, 65, 200, 1000, 4200]
FALSE_ALARM = 1e-4  # of each statistical check; seeds are fixed


BATCHES = {
    "seed": st.integers(0, 2**32),
    "sequences": st.integers(1, 5),
    "longest": st.integers(0, 4),
    "flavour": st.sampled_from(FLAVOURS),
    "mode": st.sampled_from(["exact", "coupled", "greedy"]),
    "kind": st.sampled_from(KINDS),
}


@settings(max_examples=100)
@given(size=st.sampled_from(SIZES), **BATCHES)
def test_cpu_gives_the_reference_tokens(
    seed: int, sequences: int, longest: int, size: int, flavour: str, mode: str, kind: str
) -> None:
    _check_cpu(seed, sequences, longest, size, flavour, mode, kind)


@pytest.mark.slow
@settings(max_examples=1000)
@given(size=st.sampled_from([*SIZES, 4097, 12_345]), **BATCHES)
def test_cpu_gives_the_reference_tokens_of_rows_of_several_chunks(
    seed: int, sequences: int, longest: int, size: int, flavour: str, mode: str, kind: str
) -> None:
    _check_cpu(seed, sequences, longest, size, flavour, mode, kind)


def _check_cpu(
    seed: int, sequences: int, longest: int, size: int, flavour: str, mode: str, kind: str
) -> None:
    random = np.random.default_rng(seed)
    rows = random_rows(random, sequences, longest, size)
    logits = random_logits(random, flavour, int(rows.offsets[-1]), size)
    rows, proposals = proposals_for(random, kind, logits, rows)
    if mode != "exact":
        proposals = None
        own = logits[rows_with_drafts(rows)]
        likely = own.argmax(axis=1) if len(own) else rows.drafts
        rows = rows._replace(drafts=np.where(random.random(len(likely)) < 0.7, likely, rows.drafts))
    expected = verify(logits, rows, mode=mode, proposals=proposals, implementation="reference")
    assert_same(verify(logits, rows, mode=mode, proposals=proposals), expected)


def _acceptance(key: int, position: int) -> tuple[float, int]:
    uniform, residual_key = cpu.acceptance(np.uint64(key), np.uint64(position))
    return float(uniform), int(residual_key)


def _one(logits: np.ndarray, drafts: list[int], position: int = 0, key: int = 7) -> DraftedRows:
    return DraftedRows(
        np.array([0, len(logits)]),
        np.array(drafts, np.int64),
        np.ones(1),
        np.array([key], np.uint64),
        np.array([position], np.uint64),
    )


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_draft_of_the_target_itself_always_stands(implementation: str) -> None:
    """p = q up to a shift of the logits: not one of 2,000 drafts may fall to rounding."""
    random = np.random.default_rng(0)
    rows = random_rows(random, 400, 9, 50)._replace(inverse_temperature=np.ones(400))
    logits = (3 * random.standard_normal((rows.offsets[-1], 50))).astype(np.float32)
    rows, proposals = proposals_for(random, "equal", logits, rows)
    found = verify(logits, rows, mode="exact", proposals=proposals, implementation=implementation)
    assert found.accepted.tolist() == (np.diff(rows.offsets) - 1).tolist()


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_what_the_target_excludes_is_rejected_and_never_drawn(implementation: str) -> None:
    logits = np.zeros((2, 9), np.float32)
    logits[0, [0, 4, 5]] = -np.inf
    for position in range(200):
        found = verify(
            logits, _one(logits, [4], position), mode="exact", implementation=implementation
        )
        assert found.accepted.tolist() == [0]
        assert found.tokens[0] not in (0, 4, 5, -1)
        assert found.tokens[1] == -1
    nothing = np.full((2, 9), -np.inf, np.float32)
    for mode in ("exact", "coupled", "greedy"):
        found = verify(nothing, _one(nothing, [4]), mode=mode, implementation=implementation)
        assert found.accepted.tolist() == [0]
        assert found.tokens.tolist() == [-1, -1]


def test_a_residual_holds_what_the_proposal_lacks() -> None:
    """q is zero on half of the target's mass: a rejection draws from that half alone."""
    logits = np.zeros((2, 8), np.float32)
    proposals = SparseProposals(
        np.arange(4, dtype=np.int32), np.array([0.625, 0.125, 0.125, 0.125]), np.array([0, 4])
    )
    counts = np.zeros(8)
    for position in range(600):
        found = verify(logits, _one(logits, [0], position), mode="exact", proposals=proposals)
        if not found.accepted[0]:
            counts[found.tokens[0]] += 1
    assert counts[:4].sum() == 0
    assert stats.chisquare(counts[4:]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("side", [-1e-9, 1e-9])
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_what_the_fast_normaliser_leaves_open_is_decided_exactly(
    side: float, implementation: str
) -> None:
    """u is a billionth away from p / q: a margin of 2.5e-5 decides nothing here."""
    random = np.random.default_rng(3)
    logits = (2 * random.standard_normal((2, 700))).astype(np.float32)
    p = softmax(logits[0])
    tested = 0
    for position in range(400):
        uniform, _ = acceptance(7, position)
        draft = int(p.argmax())
        q = p[draft] / uniform * (1 - side)
        if q < 1:
            ids = np.sort(np.array([draft, (draft + 1) % 700], np.int32))
            probabilities = np.where(ids == draft, q, 1 - q)
            found = verify(
                logits,
                _one(logits, [draft], position),
                mode="exact",
                proposals=SparseProposals(ids, probabilities, np.array([0, 2])),
                implementation=implementation,
            )
            assert found.accepted[0] == (side > 0)
            tested += 1
    assert tested > 100


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_where_rounding_leaves_no_residual_the_target_is_drawn(implementation: str) -> None:
    """Proposals a little above 1 in all, as far as they are let through, and u above p / q."""
    excess = 1 + 9e-6
    logits = np.zeros((2, 2), np.float32)
    proposals = SparseProposals(
        np.arange(2, dtype=np.int32), np.full(2, 0.5 * excess), np.array([0, 2])
    )
    position = next(each for each in range(10**6) if _acceptance(7, each)[0] > 1 / excess)
    found = verify(
        logits,
        _one(logits, [1], position),
        mode="exact",
        proposals=proposals,
        implementation=implementation,
    )
    assert found.accepted.tolist() == [0]
    assert found.tokens[0] in (0, 1)


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
    highest = normalizer.block_maxima(logits, maxima)
    padded = np.pad(logits, (0, -size % 64), constant_values=-np.inf)
    assert np.array_equal(maxima, padded.reshape(-1, 64).max(axis=1))
    assert highest == logits.max()


def test_coupled_draws_what_plain_decoding_draws() -> None:
    """Rows truncated beforehand give the tokens that `kernels.draw` truncates and draws itself."""
    random = np.random.default_rng(5)
    size, gamma, count = 200, 3, 12
    logits = (3 * random.standard_normal((count * (gamma + 1), size))).astype(np.float32)
    rows = random_rows(random, count, 0, size)
    scale = np.repeat(np.maximum(rows.inverse_temperature, 0.25), gamma + 1)
    position = np.repeat(rows.position, gamma + 1) + np.tile(
        np.arange(gamma + 1, dtype=np.uint64), count
    )
    key = np.repeat(rows.key, gamma + 1)
    every = len(logits)
    limits = (np.full(every, 20), np.full(every, 0.9), np.full(every, math.log(0.01)))
    controls = Controls(scale, *limits, key, position)
    ids = np.tile(np.arange(size, dtype=np.int32), every)
    # The references: others prove that the kernels agree with them.
    offsets = np.arange(every + 1) * size
    tokens = draw(ids, logits.ravel(), offsets, controls, implementation="reference")
    plain = tokens.reshape(count, gamma + 1)
    for row in range(every):
        keep = truncate(
            logits[row],
            inverse_temperature=scale[row],
            top_k=20,
            top_p=0.9,
            min_p=0.01,
            implementation="reference",
        )
        logits[row, ~keep] = -np.inf
    drafts = plain[:, :gamma].copy()
    wrong = random.integers(0, gamma + 1, count)  # the first wrong draft, if any
    for sequence in range(count):
        drafts[sequence, wrong[sequence] :] = 199 - drafts[sequence, wrong[sequence] :]
    drafted = DraftedRows(
        np.arange(count + 1) * (gamma + 1),
        drafts.ravel(),
        scale[:: gamma + 1],
        rows.key,
        rows.position,
    )
    found = verify(logits, drafted, mode="coupled")
    assert found.accepted.tolist() == wrong.tolist()
    for sequence, emitted in enumerate(found.tokens.reshape(count, gamma + 1)):
        length = wrong[sequence] + 1
        assert emitted[:length].tolist() == plain[sequence, :length].tolist()
        assert (emitted[length:] == -1).all()


@pytest.mark.parametrize("mode", ["exact", "coupled"])
def test_without_drafts_every_mode_decodes_plainly(mode: str) -> None:
    random = np.random.default_rng(6)
    rows = random_rows(random, 30, 0, 500)
    logits = random_logits(random, "plain", 30, 500)
    found = verify(logits, rows, mode=mode)
    for row in range(30):
        scores = logits[row].astype(np.float64)
        if rows.inverse_temperature[row]:
            scores *= rows.inverse_temperature[row]
            scores += gumbel_row(int(rows.key[row]), int(rows.position[row]), 500)
        assert found.tokens[row] == scores.argmax()


def _part(rows: DraftedRows, sequence: int) -> tuple[DraftedRows, slice, slice]:
    first, stop = rows.offsets[sequence], rows.offsets[sequence + 1]
    drafts = slice(first - sequence, stop - sequence - 1)
    alone = slice(sequence, sequence + 1)
    return (
        DraftedRows(
            np.array([0, stop - first]),
            rows.drafts[drafts],
            rows.inverse_temperature[alone],
            rows.key[alone],
            rows.position[alone],
        ),
        slice(first, stop),
        drafts,
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sequence_does_not_depend_on_its_batch(threads: int) -> None:
    random = np.random.default_rng(8)
    rows = random_rows(random, 12, 4, 200)
    logits = random_logits(random, "plain", int(rows.offsets[-1]), 200)
    rows, proposals = proposals_for(random, "close", logits, rows)
    assert isinstance(proposals, DenseProposals)
    pool.set_threads(threads)
    try:
        together = verify(logits, rows, mode="exact", proposals=proposals)
    finally:
        pool.set_threads(1)
    for sequence in range(12):
        alone, own, drafts = _part(rows, sequence)
        some = DenseProposals(
            proposals.logits[drafts], proposals.inverse_temperature[sequence : sequence + 1]
        )
        found = verify(logits[own], alone, mode="exact", proposals=some)
        assert found.accepted[0] == together.accepted[sequence]
        assert found.tokens.tolist() == together.tokens[own].tolist()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([7, 65, 1000]),
    mode=st.sampled_from(["exact", "coupled", "greedy"]),
    kind=st.sampled_from(KINDS),
    implementation=st.sampled_from(["reference", "cpu"]),
)
def test_a_row_alone_emits_what_it_emits_among_others(
    seed: int, size: int, mode: str, kind: str, implementation: str
) -> None:
    """Drafts verified one by one, without a row after them, up to the first that does not stand."""
    random = np.random.default_rng(seed)
    rows = random_rows(random, 4, 4, size)
    logits = random_logits(random, "plain", int(rows.offsets[-1]), size)
    rows, proposals = proposals_for(random, kind, logits, rows)
    together = verify(
        logits,
        rows,
        mode=mode,
        proposals=proposals if mode == "exact" else None,
        implementation=implementation,
    )
    tested = rows_with_drafts(rows)
    owners = np.searchsorted(rows.offsets, tested, side="right") - 1
    single = DraftedRows(
        np.arange(len(tested) + 1),
        rows.drafts,
        rows.inverse_temperature[owners],
        rows.key[owners],
        rows.position[owners] + (tested - rows.offsets[owners]).astype(np.uint64),
        bonus=False,
    )
    if isinstance(proposals, DenseProposals):
        proposals = replace(proposals, inverse_temperature=proposals.inverse_temperature[owners])
    alone = verify(
        logits[tested],
        single,
        mode=mode,
        proposals=proposals if mode == "exact" else None,
        implementation=implementation,
    )
    reached = tested <= rows.offsets[owners] + together.accepted[owners]
    assert alone.tokens[reached].tolist() == together.tokens[tested[reached]].tolist()
    assert alone.accepted[reached].tolist() == (
        (tested < rows.offsets[owners] + together.accepted[owners])[reached].tolist()
    )


@pytest.mark.parametrize("mode", ["exact", "coupled", "greedy"])
def test_rows_after_the_first_rejection_are_not_read(mode: str) -> None:
    random = np.random.default_rng(9)
    rows = random_rows(random, 40, 4, 100)
    logits = random_logits(random, "plain", int(rows.offsets[-1]), 100)
    found = verify(logits, rows, mode=mode)
    unread = logits.copy()
    for sequence, count in enumerate(found.accepted):
        unread[rows.offsets[sequence] + count + 1 : rows.offsets[sequence + 1]] = np.nan
    assert np.isnan(unread).any()
    assert_same(verify(unread, rows, mode=mode), found)


def test_of_a_proposal_only_what_decides_is_read() -> None:
    """Two uniform laws over 40,000 tokens, and a draft that is half of both: with u below p = 1/2
    nothing of the proposal matters; above, the share of its denominator that makes q < p / u."""
    size = 40_000
    logits = np.zeros((2, size), np.float32)
    logits[:, 7] = math.log(size - 1)
    proposals = DenseProposals(logits[:1].copy(), np.ones(1))
    read = {}
    for position in range(60):
        uniform, _ = acceptance(7, position)
        found = verify(logits, _one(logits, [7], position), mode="exact", proposals=proposals)
        assert found.accepted.tolist() == [1]
        read[uniform] = int(found.logits_read[0]) - 2 * size
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
    logits = random.standard_normal((2, 9000)).astype(np.float32)
    logits[:, 5000] = -90.0
    if where != "last":
        logits[:, 10] = 60.0
    if where != "first":
        logits[:, 8990] = 61.0
    logits[:, 3000:3100] = -np.inf
    for position in range(20):
        rows = _one(logits, [5000 if position % 2 else 10], position)
        rows = rows._replace(inverse_temperature=np.full(1, scale))
        proposed = np.roll(logits[:1], 1, axis=1) if position % 3 else logits[:1].copy()
        proposals = DenseProposals(proposed, np.ones(1))
        expected = verify(
            logits, rows, mode="exact", proposals=proposals, implementation="reference"
        )
        assert_same(verify(logits, rows, mode="exact", proposals=proposals), expected)


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
            normalizer.block_maxima(p, maxima)
            found.append(
                race.race(
                    row,
                    race.ProposedRow(race.DENSE, 0, proposed, cpu.NO_IDS, cpu.NO_PROBABILITIES),
                    np.bool_(True),
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
    for module in (cpu, race, normalizer):
        kernels = [each for each in vars(module).values() if hasattr(each, "targetoptions")]
        assert kernels
        assert all(each.targetoptions.get("nogil") for each in kernels)


def test_what_does_not_fit_is_refused() -> None:
    logits = np.zeros((3, 10), np.float32)
    rows = _one(logits, [1, 2])
    dense = DenseProposals(np.zeros((2, 10), np.float32), np.ones(1))
    sparse = SparseProposals(np.array([1, 2], np.int32), np.ones(2), np.arange(3))
    verify(logits, rows, mode="exact", proposals=dense)
    verify(logits, rows, mode="exact", proposals=sparse)
    wrong = [
        ("none of exact", {"mode": "fuzzy"}),
        ("float32", {"logits": logits.astype(np.float64)}),
        ("contiguous", {"logits": np.zeros((10, 3), np.float32).T}),
        ("offsets end", {"logits": np.zeros((4, 10), np.float32)}),
        ("at least one row", {"rows": rows._replace(offsets=np.array([0, 3, 3]))}),
        ("drafts, got", {"rows": rows._replace(drafts=np.array([1]))}),
        ("do not fit a vocabulary", {"rows": rows._replace(drafts=np.array([1, 10]))}),
        ("one value for each", {"rows": rows._replace(key=np.zeros(2, np.uint64))}),
        ("finite", {"rows": rows._replace(inverse_temperature=np.array([np.inf]))}),
        ("32 bits", {"rows": rows._replace(position=np.array([2**32 - 2], np.uint64))}),
        ("leave the proposals out", {"mode": "coupled", "proposals": dense}),
        ("of shape", {"proposals": replace(dense, logits=np.zeros((3, 10), np.float32))}),
        ("temperature above 0", {"proposals": replace(dense, inverse_temperature=np.zeros(1))}),
        ("normalise", {"proposals": replace(sparse, probabilities=np.full(2, 0.9))}),
        ("float64", {"proposals": replace(sparse, probabilities=np.ones(2, np.float32))}),
        ("sorted", {"proposals": replace(sparse, ids=np.array([1, 10], np.int32))}),
        ("draft 1 has no", {"proposals": replace(sparse, ids=np.array([1, 3], np.int32))}),
        ("at least one token", {"proposals": replace(sparse, offsets=np.array([0, 2]))}),
    ]
    for message, changes in wrong:
        arguments = {"logits": logits, "rows": rows, "mode": "exact", "proposals": None, **changes}
        given_logits, given_rows = arguments.pop("logits"), arguments.pop("rows")
        with pytest.raises(ValueError, match=message):
            verify(given_logits, given_rows, **arguments)  # type: ignore[arg-type]
