"""The proof that certificates are never wrong, and that this proof would notice if they were.

A position is one row, a hidden state with what it needs, that `Shard.screen` and `Shard.rescore`
decided. It is compared with an oracle that sorts every canonical logit (`certificate_cases`): the
candidates must hold all that the need asks for (the argmax, the noisy argmax, the exact k best, the
min-p set), be the nucleus, or leave at most epsilon of the softmax out; their logits must be the
canonical ones bit for bit; and the token that is drawn from them must be the one drawn from all.
Only positions with a certificate count: those that fell back to every logit are judged as well, but
prove nothing.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import actors.head.screens
import actors.head.whole_softmax
from actors.head.ladder import Ladder
from actors.head.output_rows import NonFiniteHiddenError
from actors.head.paper.paper_head import PaperHead
from actors.head.paper.settings import PaperSettings
from actors.head.screens import DENSE
from actors.head.shard import Shard
from actors.messages import Candidates, Need, NeedKind
from actors.states.needs import flatten_adjustments
from kernels.bounds import summarise
from kernels.linear import linear, pack
from kernels.mass import OutsideMass
from kernels.penalties import adjust
from kernels.quantize import Kind
from kernels.rows import canonical_logits
from kernels.screen import Screened, vnni
from kernels.search import Estimates
from tests.support.certificate_cases import (
    CHOICES,
    FLAVOURS,
    HIDDEN_KINDS,
    KINDS,
    PROBABILISTIC,
    SCREENS,
    Array,
    Head,
    Tally,
    adjusted_logits,
    flavoured_weight,
    hidden_states,
    judge,
    judge_many,
    near_ties,
    numbered_head,
    random_needs,
    truth,
    violations,
    with_noise,
    with_tiers,
)
from tests.support.cluster_cases import nearby

# What `make test` decides, per screen, and `make prove` ten times.
POSITIONS = {
    "int8": 280_000,
    "int4": 230_000,
    "int4-dither": 140_000,
    "1-bit": 60_000,
    DENSE: 190_000,
    "switching": 110_000,
}
FULL_SIZE = {"int8": 600, "int4": 250, DENSE: 150}
MILLION = 1_000_000


def test_the_counts_promised_here_add_up() -> None:
    assert set(POSITIONS) == set(SCREENS)
    assert sum(POSITIONS.values()) >= MILLION
    assert sum(FULL_SIZE.values()) >= 1000


# -- zero violations ------------------------------------------------------------------------------


def _prove(screen: str, wanted: int, seed: int, first: int = 0) -> None:
    tally = judge_many(screen, wanted, seed, first)
    print(f"{screen}: {tally.report()}")
    assert tally.wrong == []
    assert tally.certified >= wanted
    assert tally.adjusted > 0.04 * wanted
    aimed = len(HIDDEN_KINDS) - 2 * (screen in PROBABILISTIC)
    assert (
        tally.chance < 1e-9 * wanted
        if screen in (*PROBABILISTIC, "switching")
        else not tally.chance
    )
    assert set(tally.flavours) == set(FLAVOURS)
    assert min(tally.flavours.values()) > 0.01 * wanted
    assert len(tally.hidden) == aimed
    assert min(tally.hidden.values()) > 0.03 * wanted
    assert set(tally.kinds) == set(KINDS)
    assert min(tally.kinds[kind] for kind in KINDS[:4]) > 0.05 * wanted
    assert min(tally.kinds[kind] for kind in KINDS[4:]) > 0.0005 * wanted
    if screen == "switching":
        assert len(tally.tiers) == 4
    else:
        assert tally.tiers[screen] > 0.9 * wanted


@pytest.mark.parametrize("screen", SCREENS)
def test_a_million_certificates_and_none_is_wrong(screen: str) -> None:
    """1,010,000 certified positions at 64 to 4,096 rows of 8 to 64 columns; 0 violations.

    280,000 are screened with int8, 230,000 with int4 (refined by its low plane where that pays),
    140,000 with dithered int4, 60,000 with one bit (then int4), 190,000 with fp32 products, and
    110,000 in steps of 1 to 120 rows by a ladder that changes with the number of rows. The heads
    are of all `FLAVOURS` in turn, fp32 and bf16, some with biases, scales, soft-caps or a common
    direction; hidden states in equal shares of all `HIDDEN_KINDS`; 30% of the needs greedy, 34%
    Gumbel, 20% top-k, 15% min-p, 0.5% nucleus and epsilon each; 10% have processors.

    int8, int4 and fp32 never fail. A dithered or 1-bit certificate fails with probability at most
    1e-12 per token of the vocabulary, which adds up to less than 1e-4 over all that are counted.
    """
    _prove(screen, POSITIONS[screen], seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("screen", SCREENS)
def test_ten_million_certificates_and_none_is_wrong(screen: str) -> None:
    """10,100,000 certified positions, ten times as many as above, on other heads; 0 violations.

    Dithered and 1-bit certificates fail with probability less than 1e-3, all taken together.
    """
    _prove(screen, 10 * POSITIONS[screen], seed=2, first=10_000)


@pytest.fixture(scope="module")
def full_size() -> Head:
    """V = 131,072, d = 1,024 in bf16: clustered rows whose norms vary, with some copies."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(131_072, 1024, generator=generator)
    weight *= 0.02 * torch.exp(0.3 * torch.randn(131_072, 1, generator=generator))
    weight[1::8] = 0.8 * weight[::8] + 0.2 * weight[1::8]
    weight[2::64] = weight[::64]
    return with_tiers("full size", weight.bfloat16(), kinds=("int8", "int4"), aimed=2048)


def _prove_full_size(head: Head, counts: dict[str, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    _check_canonical(head, hidden_states(random, head, "int8", 8)[0])
    shares = (0.28, 0.28, 0.28, 0.12, 0.02, 0.02)
    # As an engine has it: the dense screen is the row kernel.
    shard = Shard(
        head.weight,
        None,
        None,
        1.0,
        len(head.weight),
        linear=functools.partial(linear, weight=pack(head.weight)),
        ladder=Ladder(head.tiers, CHOICES["int8"]),
    )
    for screen, wanted in counts.items():
        tally = Tally()
        while tally.certified < wanted:
            batch = random_needs(random, len(head.weight), 24, shares=shares)
            hidden, kinds = hidden_states(random, head, screen, 24)
            shard.start_with(((1, screen),))
            judge(head, shard, hidden, kinds, batch, tally, screen)
        print(f"{screen}: {tally.report()}")
        assert tally.wrong == []
        assert tally.tiers[screen] > 0.9 * wanted


def _check_canonical(head: Head, hidden: Array) -> None:
    """The oracle's logits are float64 products, rounded to fp32."""
    exact = torch.from_numpy(hidden).double()
    fast = torch.from_numpy(canonical_logits(hidden, head.weight)).double()
    for first in range(0, len(head.weight), 8192):
        rows = head.weight[first : first + 8192].double()
        wide = exact @ rows.T
        sizes = exact.norm(dim=1)[:, None] * rows.norm(dim=1)
        error = (fast[:, first : first + 8192] - wide).abs()
        assert (error <= 2.0**-24 * wide.abs() + 1e-12 * sizes + 1e-45).all()


def test_a_thousand_certificates_at_full_size(full_size: Head) -> None:
    """V = 131,072, d = 1,024: 600 positions by int8, 250 by int4, 150 by fp32; 0 violations."""
    _prove_full_size(full_size, FULL_SIZE, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_certificates_at_full_size(full_size: Head) -> None:
    """6,000 by int8, 2,500 by int4, 1,500 by fp32; 0 violations."""
    _prove_full_size(full_size, {name: 10 * count for name, count in FULL_SIZE.items()}, seed=4)


def test_the_larger_threshold_of_two_shards_holds_for_both() -> None:
    """5,000 positions on two shards that share their thresholds: no wanted token is missing from
    their union, whichever tier each screens with."""
    random = np.random.default_rng(11)
    decided = missing = 0
    number = 0
    while decided < 5_000:
        head = numbered_head(number)
        size, number = len(head.weight), number + 1
        cut = int(random.integers(1, size))
        shards = []
        for part in (slice(0, cut), slice(cut, size)):
            bias = None if head.bias is None else head.bias[part]
            own = with_tiers(
                head.flavour, head.weight[part], bias, head.softcap, head.scale, ("int8", "int4")
            )
            shards.append(own.shard(str(random.choice(["int8", "int4", DENSE]))))
        # Noise belongs to ids of the whole vocabulary, so that these needs have none.
        batch = random_needs(
            random, size, 256, kinds=("greedy", "topk", "minp"), shares=(0.4, 0.3, 0.3), adjusted=0
        )
        hidden, _ = hidden_states(random, head, "int4", 256)
        found = [shard.screen(hidden, batch.needs) for shard in shards]
        shared = np.fmax(found[0].tau, found[1].tau)
        known = ~np.isnan(found[0].tau) & ~np.isnan(found[1].tau)
        right = truth(head.canonical(hidden), batch)
        held = np.zeros(right.wanted.shape, np.bool_)
        certified = known.copy()
        for shard, thresholds, first in zip(shards, found, (0, cut), strict=True):
            own_tau = np.where(known, shared, thresholds.tau)
            candidates = shard.rescore(replace(thresholds, tau=own_tau))
            rows = np.repeat(np.arange(256), np.diff(candidates.offsets))
            held[rows, candidates.ids + first] = True
            certified &= [each.guarantee != "dense" for each in candidates.certificates]
        decided += int(certified.sum())
        missing += int((right.wanted & ~held).any(axis=1).sum())
    assert missing == 0


def test_certificates_of_cluster_bounds_are_never_wrong() -> None:
    """2,000 positions of the paper's head on the same heads, needs and hidden states."""
    random = np.random.default_rng(13)
    tally = Tally()
    number = 0
    while tally.certified < 2_000:
        head = numbered_head(number)
        size, number = len(head.weight), number + 1
        order, offsets = nearby(head.weight, max(size // 12, 1))
        clusters = summarise(head.weight, head.bias, order, offsets)
        post = (head.softcap, head.scale, size)
        paper = PaperHead(head.weight, head.bias, *post, clusters, PaperSettings(budget_share=0.9))
        batch = random_needs(random, size, 64, shares=(0.25, 0.25, 0.2, 0.2, 0.05, 0.05))
        hidden, kinds = hidden_states(random, head, DENSE, 64)
        judge(head, paper, hidden, kinds, batch, tally, "clusters")
    print(f"clusters: {tally.report()}")
    assert tally.wrong == []
    assert min(tally.kinds[kind] for kind in KINDS) > 10


@pytest.mark.parametrize("screen", SCREENS)
def test_the_largest_weights_meet_the_smallest_hidden_states(screen: str) -> None:
    """Logits of ordinary size from weights near the largest numbers and hidden states near the
    smallest: slacks may not vanish on the way."""
    random = np.random.default_rng(12)
    tally = Tally()
    for size, wide, narrow in ((1e37, 3e-44, 1e-38), (1e30, 1e-43, 1e-30), (1e18, 1e-40, 1e-18)):
        weight = torch.from_numpy((size * random.standard_normal((481, 52))).astype(np.float32))
        head = with_tiers("huge", weight)
        lengths = np.exp(random.uniform(math.log(wide), math.log(narrow), (400, 1)))
        hidden = (lengths * random.standard_normal((400, 52))).astype(np.float32)
        batch = random_needs(random, 481, 400)
        judge(head, head.shard(screen), hidden, np.full(400, "smallest"), batch, tally, screen)
    assert tally.wrong == []


# -- the oracle itself ----------------------------------------------------------------------------


def test_the_oracles_logits_are_the_references() -> None:
    """Canonical logits and processors, checked against the plain forms on every flavour."""
    random = np.random.default_rng(2)
    for number in range(22):
        head = numbered_head(number)
        hidden, _ = hidden_states(random, head, "int8", 6)
        fast = canonical_logits(hidden, head.weight)
        plain = canonical_logits(hidden, head.weight, implementation="reference")
        assert fast.view(np.int32).tolist() == plain.view(np.int32).tolist()
        wide = hidden.astype(np.float64) @ head.weight.double().numpy().T
        sizes = np.linalg.norm(hidden.astype(np.float64), axis=1)[:, None]
        sizes = sizes * np.linalg.norm(head.weight.double().numpy(), axis=1)
        finite = np.abs(wide) < 3e38
        error = np.abs(np.where(finite, fast.astype(np.float64) - wide, 0.0))
        assert (error <= 2.0**-24 * np.abs(wide) + 1e-13 * sizes + 1e-45)[finite].all()
        size = len(head.weight)
        batch = random_needs(random, size, 6, adjusted=1.0)
        ids, offsets = np.arange(size, dtype=np.int32), np.array([0, size])
        for logits, need in zip(head.canonical(hidden), batch.needs, strict=True):
            assert need.adjustment is not None
            with np.errstate(over="ignore", invalid="ignore"):
                ours = adjusted_logits(logits, need.adjustment)
                flat = flatten_adjustments([need.adjustment])
                theirs = adjust(ids, logits, offsets, flat, implementation="reference")
            assert np.array_equal(ours, theirs, equal_nan=True)


def test_the_oracle_notices_a_token_less_and_a_bit_more() -> None:
    head = with_tiers("random", torch.from_numpy(_plain(300, 16)), kinds=("int8",))
    random = np.random.default_rng(4)
    hidden, _ = hidden_states(random, head, "int8", 60)
    batch = random_needs(
        random, 300, 60, kinds=("topk", "minp", "nucleus", "epsilon"), shares=(0.25,) * 4
    )
    shard = head.shard(DENSE)
    found = shard.rescore(shard.screen(hidden, batch.needs))
    right = truth(head.canonical(hidden), batch)
    assert (violations(right, batch, found) == "").all()
    first = found.offsets[:-1]
    bits = found.logits.copy()
    bits[first] = np.nextafter(bits[first], np.float32(np.inf))
    wrong = violations(right, batch, replace(found, logits=bits))
    assert (wrong != "").all()
    noticed = violations(right, batch, _without_the_best(found))
    certified = np.array([each.guarantee != "dense" for each in found.certificates])
    # Without its best token a list may still leave out less than epsilon.
    assert (noticed != "")[certified & (batch.kinds != "epsilon")].all()


def _plain(size: int, columns: int) -> Array:
    random = np.random.default_rng(size)
    return flavoured_weight(random, size, columns, "random").astype(np.float32)


def _without_the_best(found: Candidates) -> Candidates:
    """The candidates of every row but the one with the largest logit."""
    keep = np.ones(len(found.ids), np.bool_)
    for start, stop in zip(found.offsets[:-1], found.offsets[1:], strict=True):
        keep[start + found.logits[start:stop].argmax()] = False
    return replace(
        found,
        ids=found.ids[keep],
        logits=found.logits[keep],
        raw=found.raw[keep],
        offsets=found.offsets - np.arange(len(found.offsets)),
    )


# -- mutations: with half the bound there are violations ------------------------------------------


def _halved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Screens (`screen`) or refinements (`refine`) now claim half the error they may make."""
    honest: Callable[..., Screened] = getattr(actors.head.screens, name)

    def careless(*arguments: Any) -> Screened:
        screened = honest(*arguments)
        return screened._replace(hidden_slack=0.5 * screened.hidden_slack)

    monkeypatch.setattr(actors.head.screens, name, careless)


# Four ways to ask for the best token; noise is nothing beside such an inverse temperature.
BEST = {
    "greedy": Need("top1"),
    "gumbel": Need("top1", inverse_temperature=float(np.float32(1e12))),
    "topk": Need("topk", k=1, inverse_temperature=1.0),
    "minp": Need("minp", min_p=1.0, inverse_temperature=1.0),
}


def _lost(head: Head, shard: Shard, hidden: Array, screen: str) -> Counter[str]:
    """How many best tokens are lost, by the kind of need."""
    tally = Tally()
    for part in np.array_split(hidden, math.ceil(len(hidden) / 64)):
        kinds = np.resize(np.array(list(BEST)), len(part))
        batch = with_noise([BEST[kind] for kind in kinds], kinds, len(head.weight))
        if screen != DENSE:
            shard.start_with(CHOICES[screen])
        judge(head, shard, part, kinds, batch, tally, screen)
    assert tally.certified > 0.5 * len(hidden)
    return Counter(kind for kind in BEST for each in tally.wrong if f"({kind}," in each)


def _assert_noticed(name: str, lost: Counter[str], positions: int) -> None:
    """At least 20 in 1,000 are wrong, and some of every kind."""
    print(f"{name}: {lost.total()} of {positions} are wrong with half the bound, {dict(lost)}")
    assert lost.total() >= 0.02 * positions
    assert set(lost) == set(BEST)


def _aimed(head: Head, loss: str, blend: tuple[float, float], count: int) -> Array:
    """Near ties along the losses of two rows, see `near_ties`."""
    random = np.random.default_rng(9)
    first = random.integers(0, len(head.wide), count)
    blends = random.uniform(*blend, count)
    return near_ties(head.wide, head.losses[loss], first, blends, 1e-6).astype(np.float32)


def _clustered(size: int, columns: int, clusters: int, spread: float) -> torch.Tensor:
    random = np.random.default_rng(size)
    centres = random.standard_normal((clusters, columns))
    noise = spread * random.standard_normal((size, columns))
    return torch.from_numpy((centres[np.arange(size) % clusters] + noise).astype(np.float32))


def _within_the_bound(head: Head, kind: str, hidden: Array) -> Array:
    """Those of ``hidden`` whose every estimate errs by less than its bound.

    Hidden states are aimed at what a probabilistic tier lost of the weights, which it makes no
    promise about: only those count here for which its bound holds all the same.
    """
    screened = actors.head.screens.screen(hidden, head.tiers[kind])
    error = np.abs(screened.estimate - canonical_logits(hidden, head.weight).astype(np.float64))
    bound = screened.hidden_slack @ screened.row_slack.astype(np.float64)
    return hidden[(error < bound).all(axis=1)]


@pytest.mark.parametrize(
    ("kind", "columns", "blend"),
    [
        ("int8", 48, (0.3, 1.5)),
        ("int4", 48, (0.3, 1.5)),
        ("int4-dither", 1024, (0.5, 2.0)),
        ("1-bit", 256, (0.5, 2.0)),
    ],
)
def test_half_the_bound_of_a_tier_is_not_enough(
    kind: Kind, columns: int, blend: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states along what the tier lost of two rows that almost tie: no violation, but at
    least 20 in 1,000 as soon as the screen claims half its error."""
    # They are not aimed at what 8-bit hidden states lose, to which half the bound would belong.
    monkeypatch.setattr(vnni, "AVAILABLE", False)
    head = with_tiers("clustered", _clustered(480, columns, 40, 0.3), kinds=(kind,))
    shard = Shard(
        head.weight, None, None, 1.0, 480, ladder=Ladder({kind: head.tiers[kind]}, CHOICES[kind])
    )
    hidden = _within_the_bound(head, kind, _aimed(head, kind, blend, 1000))
    assert len(hidden) > 500
    assert not _lost(head, shard, hidden, kind)
    _halved("screen", monkeypatch)
    _assert_noticed(kind, _lost(head, shard, hidden, kind), len(hidden))


def test_half_the_bound_of_a_refinement_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along what both planes of int4 lost of 128 almost equal rows, too many to rescore at once."""
    head = with_tiers("clustered", _clustered(2048, 64, 16, 0.001), kinds=("int4",))
    shard = head.shard("int4")
    loss = head.losses["int4 fine"][:1000]
    lengths = np.linalg.norm(loss, axis=1) / np.linalg.norm(head.wide[:1000], axis=1)
    blend = np.random.default_rng(9).uniform(0.3, 1.5, 1000)
    hidden = (loss + (blend * lengths)[:, None] * head.wide[:1000]).astype(np.float32)
    assert not _lost(head, shard, hidden, "int4")
    _halved("refine", monkeypatch)
    _assert_noticed("refinement", _lost(head, shard, hidden, "int4"), len(hidden))


def test_half_the_bound_of_fp32_products_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 sums that err by nine tenths of ``gamma_d ||W_i|| ||h||``, against the best token and
    in favour of all others. No order of summation comes near that for these rows; the bound allows
    it, so that it must hold."""
    size, columns = 480, 64
    weight = _clustered(size, columns, 8, 1e-5)
    norms = weight.double().norm(dim=1)

    def worst_sums(hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.double() @ weight.double().T
        best = torch.nn.functional.one_hot(exact.argmax(dim=1), size)
        error = 0.9 * columns * 2.0**-24 * hidden.double().norm(dim=1)[:, None] * norms
        return (exact + error * (1 - 2 * best)).float()

    head = with_tiers("clustered", weight, kinds=())
    random = np.random.default_rng(6)
    states = random.standard_normal((1000, columns)).astype(np.float32)
    assert not _lost(head, head.shard(DENSE, worst_sums), states, DENSE)
    shard = head.shard(DENSE, worst_sums)
    monkeypatch.setattr(shard._dense, "_relative_error", 0.5 * shard._dense._relative_error)
    _assert_noticed("fp32", _lost(head, shard, states, DENSE), len(states))


@pytest.mark.parametrize("kind", ["epsilon", "nucleus"])
def test_half_the_bound_of_the_outside_mass_is_not_enough(
    kind: NeedKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token and 399 copies of another whose logits the screen sees up to 6 nats too low: what
    seems a small mass outside is not."""
    random = np.random.default_rng(8)
    tally = Tally()
    heads = [_one_against_many(random) for _ in range(12)]

    def judge_all() -> Tally:
        tally = Tally()
        for head in heads:
            hidden, needs = _underrated_masses(random, head, kind)
            kinds = np.full(len(needs), kind)
            shard = head.shard("int8")
            judge(head, shard, hidden, kinds, with_noise(needs, kinds, 400), tally)
        return tally

    tally = judge_all()
    assert tally.wrong == []
    assert tally.certified > 100
    honest = actors.head.whole_softmax.outside_mass

    def careless(estimates: Estimates, *arguments: Any) -> OutsideMass:
        return honest(estimates._replace(hidden_slack=0.5 * estimates.hidden_slack), *arguments)

    monkeypatch.setattr(actors.head.whole_softmax, "outside_mass", careless)
    mutated = judge_all()
    print(f"{kind}: {len(mutated.wrong)} of {mutated.certified} are wrong with half the bound")
    assert len(mutated.wrong) >= 0.02 * mutated.certified


def _one_against_many(random: np.random.Generator) -> Head:
    weight = np.repeat(random.standard_normal((2, 32)), (1, 399), axis=0)
    return with_tiers("copies", torch.from_numpy(weight.astype(np.float32)), kinds=("int8",))


def _underrated_masses(
    random: np.random.Generator, head: Head, kind: NeedKind
) -> tuple[Array, list[Need]]:
    """Hidden states [60, 32] along the loss of the many, with the one ahead by about as much as
    makes the outside mass what is allowed."""
    allowed = 10.0 ** random.uniform(-3, -1, 60)
    underrated = random.uniform(1.0, 6.0, 60)
    ahead = np.log(399 / allowed) + random.uniform(-4.0, 4.0, 60)
    loss, between = head.losses["int8"][1], head.wide[0] - head.wide[1]
    across = between - (between @ loss) / (loss @ loss) * loss
    states = np.outer(underrated / (loss @ loss), loss)
    states += np.outer((ahead - states @ between) / (across @ across), across)
    needs = [
        Need("epsilon", epsilon=each, inverse_temperature=1.0)
        if kind == "epsilon"
        else Need("nucleus", top_p=1.0 - each, inverse_temperature=1.0)
        for each in allowed.tolist()
    ]
    return states.astype(np.float32), needs


# -- hidden states that mean nothing --------------------------------------------------------------


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_token_comes_from_nan_or_infinity(screen: str, bad: float) -> None:
    """Whatever the need, beside whichever rows: an error that names the rows, never a token."""
    random = np.random.default_rng(1)
    head = numbered_head(0)
    shard, size = head.shard(screen), len(head.weight)
    batch = random_needs(random, size, 24, shares=(0.2, 0.2, 0.2, 0.2, 0.1, 0.1))
    needs = [*batch.needs, Need("dense")]
    for rows in ([24], [0], [3, 17], list(range(25))):
        hidden = random.standard_normal((25, head.wide.shape[1])).astype(np.float32)
        hidden[rows, random.integers(0, hidden.shape[1], len(rows))] = bad
        with pytest.raises(NonFiniteHiddenError) as raised:
            shard.screen(hidden, needs)
        assert raised.value.rows == tuple(rows)
