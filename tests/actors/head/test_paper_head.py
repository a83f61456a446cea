"""The paper's mode: its tokens are the dense head's, and what is less says so."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.head.paper.paper_head import PaperHead, raised_ids
from lexshard.actors.head.paper.settings import Fallback, PaperSettings, next_budget
from lexshard.actors.messages import SamplingParameters
from lexshard.actors.states.row_table import RowTable, flatten_adjustments
from lexshard.kernels.bounds import Clusters, Kind, summarise
from lexshard.kernels.penalties import adjust
from lexshard.kernels.rows import canonical_logits
from lexshard.kernels.truncate import truncate
from tests.support.cluster_cases import NEEDS, partition
from tests.support.sampler_cases import (
    HEAD_CASES,
    DenseHead,
    HeadCase,
    check_that_tokens_are_the_dense_heads,
    decide_step,
    state_of,
)
from tests.support.search_cases import random_adjustment

settings.register_profile("paper", deadline=None)
settings.load_profile("paper")


@settings(max_examples=40)
@given(
    case=HEAD_CASES,
    count=st.integers(1, 40),
    bounds=st.sampled_from(["ball", "cone", "best"]),
    fallback=st.sampled_from(["full", "partial", "relaxed"]),
    budget=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_tokens_are_those_of_the_dense_head(
    case: HeadCase,
    count: int,
    bounds: Kind,
    fallback: Fallback,
    budget: float,
) -> None:
    """Bit for bit, whatever is asked for; ``relaxed`` changes nothing where no epsilon is named."""
    chosen = PaperSettings(bounds=bounds, fallback=fallback, budget_share=budget)

    def head_of(
        weight: torch.Tensor, bias: torch.Tensor | None, cap: float | None, scale: float, size: int
    ) -> PaperHead:
        rows = partition(np.random.default_rng(case.seed), size, count)
        own = None if bias is None else bias[:size]
        clusters = summarise(weight[:size], own, *rows, table_size=2)
        return PaperHead(weight, bias, cap, scale, size, clusters, chosen)

    check_that_tokens_are_the_dense_heads(case, head_of)


def _tight_head(
    chosen: PaperSettings, *, spread: float = 0.05, seed: int = 1
) -> tuple[PaperHead, Clusters, torch.Tensor, torch.Tensor]:
    """40 clusters of 10 nearly equal rows, where the bounds are good; [64, 32] hidden states."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, 32, generator=generator).repeat_interleave(10, 0)
    weight = centres + spread * torch.randn(400, 32, generator=generator)
    clusters = summarise(weight, None, np.arange(400, dtype=np.int32), np.arange(0, 401, 10))
    hidden = torch.randn(64, 32, generator=generator)
    return PaperHead(weight, None, None, 1.0, 400, clusters, chosen), clusters, weight, hidden


@pytest.mark.parametrize("part", ["radius", "bias_values"])
def test_bounds_that_are_too_small_lose_tokens(part: str) -> None:
    """The check above has teeth: half the radius, or half the bias, and tokens are wrong."""
    chosen = PaperSettings(bounds="ball", budget_share=1.0)
    _, clusters, weight, hidden = _tight_head(chosen, spread=0.6)
    bias = None
    if part == "radius":
        hidden = weight - torch.from_numpy(clusters.centroid).repeat_interleave(10, 0)
    else:
        bias = 200 * torch.rand(400, generator=torch.Generator().manual_seed(2))
        clusters = summarise(weight, bias, clusters.order, clusters.offsets)
    damaged = clusters._replace(**{part: getattr(clusters, part) * np.float32(0.5)})
    head = PaperHead(weight, bias, None, 1.0, 400, clusters, chosen)
    wrong = PaperHead(weight, bias, None, 1.0, 400, damaged, chosen)
    dense = DenseHead(weight, bias, None, 1.0)
    states = [state_of(SamplingParameters(temperature=0.0), 400) for _ in hidden]
    expected = [dense.token(h, state) for h, state in zip(hidden, states, strict=True)]
    assert [d.token_id for d in decide_step(head, hidden, states)] == expected
    assert [d.token_id for d in decide_step(wrong, hidden, states)] != expected


@pytest.mark.parametrize("name", NEEDS)
def test_tight_clusters_are_certified_from_a_part_of_the_rows(name: str) -> None:
    head, _, weight, hidden = _tight_head(PaperSettings(budget_share=0.6, adaptive=False))
    candidates = head.rescore(head.screen(hidden, RowTable.of([NEEDS[name]] * 64)))
    certified = 0
    for row, certificate in enumerate(candidates.certificates):
        own = slice(candidates.offsets[row], candidates.offsets[row + 1])
        if certificate.fallback:
            assert certificate.guarantee == "dense"
            assert certificate.opened_share == 1.0
            assert own.stop - own.start == 400
            continue
        certified += 1
        assert certificate.guarantee == "deterministic"
        assert certificate.opened_share <= 0.7  # rounds of a nucleus overshoot to 0.675
        assert 0 < certificate.tightness <= 1
        assert certificate.rescored_rows == round(400 * certificate.opened_share)
        assert certificate.bytes_read >= certificate.rescored_rows * 32 * 4
        logits = canonical_logits(hidden[row : row + 1].numpy(), weight)[0]
        assert np.array_equal(candidates.raw[own], logits[candidates.ids[own]])
        if name == "top-p":
            kept = truncate(logits, inverse_temperature=1.0, top_p=0.8)
            assert np.array_equal(candidates.ids[own], np.flatnonzero(kept))
        if name == "epsilon":
            shares = np.exp(logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(float)))
            assert 1 - shares[candidates.ids[own]].sum() <= 0.05
    assert certified >= 16


@pytest.mark.parametrize("share", [0.01, 0.2, 0.6])
@pytest.mark.parametrize("name", NEEDS)
def test_the_budget_is_respected(name: str, share: float) -> None:
    chosen = PaperSettings(budget_share=share, adaptive=False, short_context=0)
    head, _, _, hidden = _tight_head(chosen)
    found = head.rescore(head.screen(hidden, RowTable.of([NEEDS[name]] * 64)))
    for certificate in found.certificates:
        assert certificate.opened_share <= share or certificate.guarantee == "dense"


def test_short_contexts_may_open_twice_the_budget() -> None:
    chosen = PaperSettings(budget_share=0.04, adaptive=False, short_context=8)
    head, _, _, hidden = _tight_head(chosen)
    need = NEEDS["top-k"]
    long, short = (
        head.rescore(head.screen(hidden, RowTable.of([replace(need, position=at)] * 64)))
        for at in (8, 7)
    )
    assert sum(c.fallback for c in short.certificates) < sum(c.fallback for c in long.certificates)
    assert 0.04 < max(c.opened_share for c in short.certificates if not c.fallback) <= 0.08


def test_only_relaxed_answers_say_relaxed_and_they_hold_twice_the_epsilon() -> None:
    chosen = PaperSettings(budget_share=0.3, adaptive=False, fallback="relaxed", short_context=0)
    head, _, weight, hidden = _tight_head(chosen)
    guarantees = set()
    for name, need in NEEDS.items():
        candidates = head.rescore(head.screen(hidden, RowTable.of([need] * 64)))
        for row, certificate in enumerate(candidates.certificates):
            guarantees.add(certificate.guarantee)
            if certificate.guarantee != "relaxed":
                continue
            assert name == "epsilon"
            assert certificate.fallback
            own = candidates.ids[candidates.offsets[row] : candidates.offsets[row + 1]]
            logits = canonical_logits(hidden[row : row + 1].numpy(), weight)[0].astype(np.float64)
            outside = 1 - np.exp(logits[own] - np.logaddexp.reduce(logits)).sum()
            assert outside <= 0.1
    assert guarantees == {"deterministic", "relaxed", "dense"}


def test_partial_opens_a_tenth_more_before_it_is_full() -> None:
    common = PaperSettings(budget_share=0.04, adaptive=False, short_context=0)
    certificates = {}
    for fallback in ("full", "partial"):
        head, _, _, hidden = _tight_head(replace(common, fallback=fallback))  # type: ignore[arg-type]
        certificates[fallback] = head.rescore(
            head.screen(hidden, RowTable.of([NEEDS["top-k"]] * 64))
        ).certificates
    saved = 0
    for full, partial in zip(certificates["full"], certificates["partial"], strict=True):
        assert full.fallback == partial.fallback
        if partial.fallback and partial.guarantee == "deterministic":
            saved += 1
            assert partial.opened_share <= 0.04 + 0.1
    assert saved > 0


def test_epsilon_draws_are_named_and_replace_only_draws_from_everything() -> None:
    chosen = PaperSettings(epsilon=0.1, budget_share=1.0)
    head, _, _, hidden = _tight_head(chosen)
    needs = [NEEDS["gumbel"], NEEDS["greedy"], NEEDS["top-k"], NEEDS["top-p"]]
    certificates = head.rescore(head.screen(hidden[:4], RowTable.of(needs))).certificates
    assert [c.need for c in certificates] == ["epsilon", "top1", "topk", "nucleus"]


def test_the_budget_settles_where_failures_are_as_wanted() -> None:
    """Steps fail where they need more than the budget: the rule finds the 98th percentile of what
    they need, from either side. With the printed sign it runs away from it."""
    random = np.random.default_rng(3)
    wanted = float(np.quantile(random.beta(2, 5, 10**6), 0.98)) * 1000

    def settle(start: float, sign: int) -> float:
        budget = start
        for need in random.beta(2, 5, 60_000) * 1000:
            failed = float(need > budget)
            budget = next_budget(budget, failed if sign > 0 else 0.04 - failed, 1000)
        return budget

    assert abs(settle(50.0, 1) / wanted - 1) < 0.15
    assert abs(settle(1000.0, 1) / wanted - 1) < 0.15
    assert settle(0.9 * wanted, -1) < 0.1 * wanted


def test_the_adaptive_budget_grows_with_failures_and_stays_when_fixed() -> None:
    for adaptive in (True, False):
        head, _, _, hidden = _tight_head(PaperSettings(budget_share=0.05, adaptive=adaptive))
        for _ in range(20):
            head.rescore(head.screen(hidden, RowTable.of([NEEDS["top-k"]] * 64)))
        assert (head.budget.rows > 20) is adaptive
        assert head.budget.rows <= 400


@given(st.integers(0, 2**32), st.integers(1, 80))
def test_ids_that_are_not_raised_are_never_above_their_raw_logit(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    adjustment = random_adjustment(random, size)
    logits = (5 * random.standard_normal(size)).astype(np.float32)
    ids = np.arange(size, dtype=np.int32)
    flat = flatten_adjustments([adjustment])
    adjusted = adjust(ids, logits, np.array([0, size]), flat)
    raised = np.flatnonzero(adjusted > logits)
    assert np.isin(raised, raised_ids(adjustment)).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    head, _, _, hidden = _tight_head(PaperSettings(adaptive=False, budget_share=0.5))
    needs = list(NEEDS.values())
    together = head.rescore(head.screen(hidden[:6], RowTable.of(needs)))
    for row, need in enumerate(needs):
        alone = head.rescore(head.screen(hidden[row : row + 1], RowTable.of([need])))
        own = slice(together.offsets[row], together.offsets[row + 1])
        assert np.array_equal(alone.ids, together.ids[own])
        assert np.array_equal(alone.logits, together.logits[own])


def test_what_the_mode_cannot_do_is_refused() -> None:
    head, clusters, weight, hidden = _tight_head(PaperSettings())
    with pytest.raises(ValueError, match="scale"):
        PaperHead(weight, None, None, -1.0, 400, clusters)
    with pytest.raises(ValueError, match="build the index again"):
        PaperHead(weight, None, None, 1.0, 399, clusters)
    with pytest.raises(ValueError, match="does not fit 400"):
        PaperHead(weight, None, None, 1.0, 401, clusters)
    broken = torch.stack([hidden[0], hidden[1] * math.nan])
    with pytest.raises(NonFiniteHiddenError, match=r"rows \[1\]"):
        head.screen(broken, RowTable.of([NEEDS["greedy"]] * 2))
    with pytest.raises(ValueError, match="of 1 rows"):
        head.screen(hidden[:2], RowTable.of([NEEDS["greedy"]]))
    for bad in ({"bounds": "cube"}, {"fallback": "none"}, {"budget_share": 0}, {"epsilon": 1.0}):
        with pytest.raises(ValueError):
            PaperSettings(**bad)
