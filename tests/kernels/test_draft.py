"""Drafting: the reference's guesses, whatever the batch and however the head is cut up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.draft import DraftHead, PendingTokens, check_head, cpu, draft, reference
from lexshard.kernels.draft.draw import begin_row, drawn_rows, offer, settle
from lexshard.kernels.draw import Controls
from lexshard.kernels.draw import reference as draw_reference
from lexshard.kernels.llama.reference import embed
from lexshard.kernels.truncate import reference as truncate_reference
from tests.support.decision_cases import FLAVOURS, random_logits
from tests.support.draft_cases import (
    WIDTH,
    DraftCase,
    head_of,
    random_case,
    random_clusters,
    random_router,
    random_stack,
    sequence_of,
)

VOCABULARY = 300


def random_weight(random: np.random.Generator, half: bool = True) -> np.ndarray:
    """Rows of tokens; ``half`` are bfloat16."""
    weight = random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    return (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if half else weight


def random_head(random: np.random.Generator, kind: str, half: bool = True) -> DraftHead:
    """Rows of which some are equal, so that the lowest id has to win."""
    weight = random_weight(random, half)
    weight[random.integers(0, VOCABULARY, 60)] = weight[random.integers(0, VOCABULARY, 60)]
    if kind == "full":
        return head_of(weight, [np.arange(VOCABULARY)])
    if kind == "static":
        return head_of(weight, [random.permutation(VOCABULARY)[:60]])
    clusters = random_clusters(random, VOCABULARY, 9)
    if kind == "clusters":
        return head_of(weight, clusters)
    router = random_router(random, WIDTH, 9, [4, 3, 1])
    return head_of(weight, clusters, always=[2, 5], router=router)


def case_of(seed: int, half: bool = True) -> DraftCase:
    """Five sequences that want up to four guesses."""
    random = np.random.default_rng(seed)
    stack = random_stack(
        random,
        half=half,
        window=(0, 7)[seed % 3 == 1],
        extras=seed % 4 > 1,
        gemma=seed % 4 == 3,
    )
    return random_case(random, stack, 5, 4)


@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["full", "static", "clusters", "routed"])
@pytest.mark.parametrize("seed", range(8))
def test_cpu_gives_the_reference_guesses(kind: str, seed: int, half: bool) -> None:
    """Ragged pending tokens and numbers of guesses, any temperatures, equal rows; what is in the
    cache afterwards, too."""
    case = case_of(seed, half)
    head = random_head(np.random.default_rng(100 + seed), kind, half)
    check_head(head, WIDTH, VOCABULARY)
    expected_stack, expected = case.run(head, reference)
    stack, found = case.run(head)
    assert found.guesses.tolist() == expected.guesses.tolist()
    assert found.rows.tolist() == expected.rows.tolist()
    for sequence, most in enumerate(case.pending.most):
        known = slice(0, max(1, int(most)))
        np.testing.assert_allclose(
            found.states[sequence, known], expected.states[sequence, known], rtol=1e-3, atol=1e-4
        )
    for name in ("key_cache", "value_cache"):
        np.testing.assert_allclose(
            getattr(stack, name), getattr(expected_stack, name), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["full", "static", "clusters", "routed"])
def test_what_guesses_were_drawn_from_is_recorded(kind: str) -> None:
    """Recording changes no guess; what was not looked at, or is no token, has no chance."""
    case = case_of(4)
    head = random_head(np.random.default_rng(4), kind)
    recording = DraftCase(case.stack, case.prefixes, case.pending._replace(record=True))
    _, plain = case.run(head)
    _, expected = recording.run(head, reference)
    _, found = recording.run(head)
    assert plain.logits.size == 0
    assert found.guesses.tolist() == plain.guesses.tolist()
    for sequence, guesses in enumerate(found.guesses):
        for step, guess in enumerate(guesses):
            if guess < 0:
                continue
            own, other = found.logits[sequence, step], expected.logits[sequence, step]
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-4)
            looked_at = np.isfinite(own)
            assert guess in head.ids[looked_at]
            assert (head.ids[looked_at] >= 0).all()
        counted = np.isfinite(found.logits[sequence, : (guesses >= 0).sum()]).sum()
        if truncates(case.pending, sequence):
            assert counted <= found.rows[sequence]
        else:
            assert counted == found.rows[sequence]


def truncates(pending: PendingTokens, sequence: int) -> bool:
    return bool(
        pending.inverse_temperature[sequence] > 0
        and (
            pending.top_k[sequence] > 0
            or pending.top_p[sequence] < 1
            or pending.log_min_p[sequence] > -np.inf
        )
    )


@pytest.mark.parametrize("kind", ["full", "routed"])
def test_a_sequence_alone_gets_the_same_bits(kind: str) -> None:
    case = case_of(3)
    head = random_head(np.random.default_rng(3), kind)
    _, together = case.run(head)
    for sequence, most in enumerate(case.pending.most):
        alone = DraftCase(
            case.stack, sequence_of(case.prefixes, sequence), sequence_of(case.pending, sequence)
        )
        _, found = alone.run(head)
        assert found.guesses[0].tolist() == together.guesses[sequence, :most].tolist()
        known = max(1, int(most))
        np.testing.assert_array_equal(found.states[0, :known], together.states[sequence, :known])


def test_how_the_head_is_cut_up_changes_nothing() -> None:
    """One cluster, many, or a router that chooses all of them."""
    random = np.random.default_rng(5)
    case = case_of(5)
    weight = random_weight(random)
    clusters = random_clusters(random, VOCABULARY, 12)
    router = random_router(random, WIDTH, 12, [99])
    heads = [
        head_of(weight, [np.arange(VOCABULARY)]),
        head_of(weight, clusters),
        head_of(weight, clusters, router=router),
        head_of(weight, clusters[::-1], always=range(12), router=router),
    ]
    answers = [case.run(head)[1] for head in heads]
    for answer in answers[1:]:
        assert answer.guesses.tolist() == answers[0].guesses.tolist()
        assert answer.rows.tolist() == answers[0].rows.tolist()


def test_the_budget_is_beside_what_is_always_looked_at() -> None:
    """Rows looked at: those of the two clusters, and of as many others as the step may have."""
    random = np.random.default_rng(6)
    clusters = np.split(np.arange(VOCABULARY), range(30, VOCABULARY, 30))
    weight = random_weight(random)
    router = random_router(random, WIDTH, 10, [4, 1])
    head = head_of(weight, clusters, always=[1, 8], router=router)
    case = case_of(6)
    _, found = case.run(head)
    expected = [30 * sum((6, 3, 3, 3)[:most]) for most in case.pending.most]
    assert found.rows.tolist() == expected


def test_guesses_end_where_no_row_is_a_token() -> None:
    """The router has chosen a cluster of fillers alone."""
    random = np.random.default_rng(7)
    weight = random_weight(random)
    router = random_router(random, WIDTH, 2, [1])
    router.outer_bias[:] = [100.0, 0.0]
    head = head_of(weight, [np.arange(20), np.arange(20, 40)], router=router)
    ids = np.where(head.ids < 20, np.int32(-1), head.ids)
    case = case_of(7)
    for module in (reference, cpu):
        _, found = case.run(head._replace(ids=ids), module)
        assert (found.guesses == -1).all()
        assert found.rows.tolist() == [0] * 5


def test_the_most_likely_of_equal_rows_is_the_lowest_id() -> None:
    """Greedy, all rows equal: rows are multiplied cluster by cluster, but ids decide."""
    case = case_of(9)
    greedy = case.pending._replace(inverse_temperature=np.zeros(5))
    weight = np.ones((VOCABULARY, WIDTH), np.float32)
    head = head_of(weight, [np.arange(100, 300), np.arange(40, 100), np.arange(7, 40)])
    _, found = DraftCase(case.stack, case.prefixes, greedy).run(head)
    assert set(found.guesses[found.guesses >= 0].tolist()) == {7}


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 16, 65, 500, 3000]),
    flavour=st.sampled_from(FLAVOURS),
    scale=st.sampled_from([0.0, 1.0, 0.25, float(np.float32(1 / 0.7)), 50.0]),
    clusters=st.integers(1, 40),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 400, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
    log_min_p=st.sampled_from([-np.inf, -np.inf, -3.0, 0.0]),
)
def test_the_draw_is_that_of_the_target(
    seed: int,
    size: int,
    flavour: str,
    scale: float,
    clusters: int,
    top_k: int,
    top_p: float,
    log_min_p: float,
) -> None:
    """Of the same logits, to the last bit, in whatever order they come."""
    random = np.random.default_rng(seed)
    logits = random_logits(random, flavour, 1, size)[0]
    key, position = int(random.integers(0, 2**64, dtype=np.uint64)), int(random.integers(2**31))
    controls = Controls(
        np.array([scale]),
        np.array([top_k]),
        np.array([top_p]),
        np.array([log_min_p]),
        np.array([key], np.uint64),
        np.array([position], np.uint64),
    )
    tokens = np.arange(size, dtype=np.int32)
    expected = draw_reference.draw(tokens, logits, np.array([0, size]), controls)
    packed = head_of(logits[:, None], random_clusters(random, size, clusters))
    panels = len(packed.panels)
    drawn = drawn_rows(1, size, panels, panels)
    truncated = top_k > 0 or top_p < 1 or log_min_p > -np.inf
    begin_row(drawn, 0, scale, controls.key[0], controls.position[0], truncated)
    own = logits[packed.ids]
    for first, last in random.permutation(list(pairwise(packed.offsets.tolist()))):
        if first < last:
            rows = slice(16 * first, 16 * last)
            offer(own[rows], packed.ids[rows], 16 * first, drawn, 0)
    kept = settle(drawn, 0, packed.ids, top_k, top_p, log_min_p)
    assert drawn.token[0] == expected[0]
    if truncated and scale > 0:
        stay = truncate_reference.truncate(logits, scale, top_k, top_p, log_min_p)
        assert sorted(packed.ids[kept].tolist()) == np.flatnonzero(stay).tolist()
    assert drawn.seen[0] == size


def _pending(**changes: object) -> PendingTokens:
    fields: dict = {
        "tokens": np.array([5, 6], np.int32),
        "offsets": np.array([0, 2]),
        "start": np.array([0], np.int32),
        "block_tables": np.array([[3, 4]], np.int32),
        "most": np.array([2], np.int32),
        "key": np.zeros(1, np.uint64),
        "inverse_temperature": np.zeros(1),
        "top_k": np.zeros(1, np.int64),
        "top_p": np.ones(1),
        "log_min_p": np.full(1, -np.inf),
        "state_before": np.zeros((1, WIDTH), np.float32),
    }
    return PendingTokens(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"offsets": np.array([0, 0])}, "at least one pending token"),
        ({"offsets": np.array([0, 3])}, "at least one pending token"),
        ({"tokens": np.array([5, VOCABULARY], np.int32)}, "no embedding"),
        ({"tokens": np.array([-1, 5], np.int32)}, "no embedding"),
        ({"start": np.array([-1], np.int32)}, "not negative"),
        ({"most": np.array([-1], np.int32)}, "not negative"),
        ({"most": np.array([32], np.int32)}, "do not fit"),
        ({"start": np.array([31], np.int32)}, "do not fit"),
        ({"block_tables": np.array([[24, 0]], np.int32)}, "none of the cache's"),
        ({"block_tables": np.array([[-1, 0]], np.int32)}, "none of the cache's"),
    ],
)
def test_native_code_is_not_given_what_it_would_read_beyond(changes: dict, complaint: str) -> None:
    random = np.random.default_rng(0)
    stack = random_stack(random, half=True)
    head = head_of(embed(stack, range(VOCABULARY)).astype(np.float32), [np.arange(VOCABULARY)])
    assert draft(stack, head, _pending()).guesses.shape == (1, 2)
    with pytest.raises(ValueError, match=complaint):
        draft(stack, head, _pending(**changes))


def test_a_head_that_is_none_is_refused() -> None:
    random = np.random.default_rng(1)
    weight = random_weight(random)
    head = head_of(weight, np.split(np.arange(VOCABULARY), [100, 180, 200]))
    router = random_router(random, WIDTH, 4, [2])
    check_head(head._replace(router=router), WIDTH, VOCABULARY)
    swapped = head.ids.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    wrong = [
        (head, 2 * WIDTH, VOCABULARY),
        (head, WIDTH, VOCABULARY - 1),
        (head._replace(ids=swapped), WIDTH, VOCABULARY),
        (head._replace(ids=np.full_like(head.ids, -1)), WIDTH, VOCABULARY),
        (head._replace(offsets=head.offsets[:-1]), WIDTH, VOCABULARY),
        (head._replace(always=np.array([4], np.int32)), WIDTH, VOCABULARY),
        (head._replace(router=random_router(random, WIDTH, 5, [2])), WIDTH, VOCABULARY),
        (head._replace(router=router._replace(budgets=router.budgets[:0])), WIDTH, VOCABULARY),
    ]
    for each, width, vocabulary in wrong:
        with pytest.raises(ValueError):
            check_head(each, width, vocabulary)
