"""Heads, hidden states and needs that are hard on certificates, and the oracle that judges them.

The oracle knows nothing of screens: it has every canonical logit of every row, applies processors
and noise to all of them and decides by sorting. Everything is vectorised over many rows, because
the promise is stated in millions of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actors.head.build import OutputHead
from actors.head.ladder import Choices, Ladder
from actors.head.screens import DENSE, Linear
from actors.head.shard import Shard
from actors.messages import Adjustment, Candidates, Need
from kernels.draw import Controls, draw
from kernels.noise import gumbel_row
from kernels.quantize import Int4Tier, Kind, Tier, quantize
from kernels.rows import canonical_logits, postprocess
from kernels.truncate.reference import truncate

Array = np.ndarray[Any, Any]

# -- heads ----------------------------------------------------------------------------------------

FLAVOURS = (
    "random",
    "clustered",
    "duplicated",
    "coarse",
    "zero rows",
    "huge rows",
    "huge",
    "denormal",
    "outlier channels",
    "heavy tails",
    "low rank",
)
KINDS_OF_TIERS: tuple[Kind, ...] = ("int8", "int4", "int4-dither", "1-bit")
PROBABILISTIC = ("int4-dither", "1-bit")
# Every tier, and a ladder that changes with the number of rows in a step.
SCREENS = ("int8", "int4", *PROBABILISTIC, DENSE, "switching")
LADDERS = {
    "int8": ("int8",),
    "int4": ("int4",),
    "int4-dither": ("int4-dither",),
    "1-bit": ("1-bit", "int4"),
    "switching": ("int8", "int4", "int4-dither"),
}
CHOICES: dict[str, Choices] = {
    name: ((1, name),) for name in ("int8", "int4", "int4-dither", "1-bit")
}
CHOICES["switching"] = ((1, "int4"), (8, "int8"), (64, DENSE), (96, "int4-dither"))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """An output head with its tiers and what they lose."""

    flavour: str
    weight: torch.Tensor  # [V, d] fp32 or bf16
    bias: torch.Tensor | None
    softcap: float | None
    scale: float
    tiers: dict[str, Tier]
    wide: Array  # [R, d] in float64 the rows that hidden states are aimed at
    losses: dict[str, Array]  # [R, d] what tiers lose of those

    def shard(self, screen: str, linear: Linear | None = None) -> Shard:
        """The head as a shard that screens with ``screen``."""
        size, ladder = len(self.weight), None
        if screen != DENSE:
            tiers = {name: self.tiers[name] for name in LADDERS[screen]}
            ladder = Ladder(tiers, CHOICES[screen])
        post = (self.softcap, self.scale)
        return Shard(self.weight, self.bias, *post, size, linear=linear, ladder=ladder)

    def canonical(self, hidden: Array) -> Array:
        """Every raw canonical logit [N, V] of ``hidden`` [N, d]."""
        raw = canonical_logits(hidden, self.weight)
        bias = None if self.bias is None else self.bias.numpy()
        return np.asarray(postprocess(raw, bias=bias, scale=self.scale, softcap=self.softcap))


def flavoured_weight(random: np.random.Generator, size: int, columns: int, flavour: str) -> Array:
    """Output weights [V, d] of a stated kind, float64."""
    weight = random.standard_normal((size, columns))
    if flavour == "clustered":
        centres = random.standard_normal((max(size // 12, 1), columns))
        weight = centres[random.integers(0, len(centres), size)] + 0.02 * weight
    elif flavour == "duplicated":
        weight = weight[random.integers(0, max(size // 3, 1), size)]
    elif flavour == "coarse":
        weight = weight.round(0)
    elif flavour == "zero rows":
        weight[random.random(size) < 0.5] = 0.0
    elif flavour == "huge rows":
        weight[random.random(size) < 0.1] *= 1e18
    elif flavour == "huge":
        weight *= random.choice([1e18, 1e22, 1e37])
    elif flavour == "denormal":
        weight *= 10.0 ** random.uniform(-42, -10, (size, 1))
    elif flavour == "outlier channels":
        weight *= np.where(random.random(columns) < 0.1, 100.0, 1.0)
    elif flavour == "heavy tails":
        weight = random.standard_t(2, (size, columns))
    elif flavour == "low rank":
        rank = max(columns // 8, 1)
        weight = weight[:, :rank] @ random.standard_normal((rank, columns)) + 1e-3 * weight
    return weight


def make_head(
    random: np.random.Generator,
    size: int,
    columns: int,
    flavour: str,
    kinds: Sequence[Kind] = KINDS_OF_TIERS,
) -> Head:
    """A head of ``flavour`` whose other properties are drawn at random."""
    weight = torch.from_numpy(flavoured_weight(random, size, columns, flavour).astype(np.float32))
    if random.random() < 0.5:
        weight = weight.bfloat16()
    bias = None
    if random.random() < 0.3:
        bias = torch.from_numpy(random.standard_normal(size).astype(np.float32))
    softcap = float(random.choice([5.0, 30.0])) if random.random() < 0.2 else None
    scale = float(random.choice([0.0625, 0.3, 2.0])) if random.random() < 0.2 else 1.0
    direction = None
    if random.random() < 0.3:
        direction = random.standard_normal(columns).astype(np.float32)
    return with_tiers(
        flavour, weight, bias, softcap, scale, kinds, direction, int(random.integers(2**32))
    )


def with_tiers(
    flavour: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    kinds: Sequence[Kind] = KINDS_OF_TIERS,
    direction: Array | None = None,
    seed: int = 0,
    aimed: int = 4096,
) -> Head:
    """A head of ``weight``; hidden states are aimed at the first ``aimed`` rows."""
    tiers: dict[str, Tier] = {
        kind: quantize(weight, kind, direction=direction, seed=seed) for kind in kinds
    }
    wide = weight[:aimed].double().numpy()
    every = np.arange(len(wide))
    losses = {name: wide - tier.dequantise(every) for name, tier in tiers.items()}
    for tier in tiers.values():
        if isinstance(tier, Int4Tier):
            losses["int4 fine"] = wide - tier.dequantise(every, fine=True)
    return Head(flavour, weight, bias, softcap, scale, tiers, wide, losses)


@functools.lru_cache(maxsize=100)
def numbered_head(number: int) -> Head:
    """The head of this number: all flavours in turn, 64 to 4,096 rows of 8 to 64 columns."""
    random = np.random.default_rng([7, number])
    size = int(64 * 2.0 ** random.uniform(0, 6))
    columns = int(random.integers(8, 65))
    return make_head(random, size, columns, FLAVOURS[number % len(FLAVOURS)])


# -- hidden states --------------------------------------------------------------------------------

AIMED = ("along the loss", "near tie, along two losses")
HIDDEN_KINDS = (
    "random",
    "flat",
    "along a row",
    "along a difference",
    "outlier channel",
    "rounding edge",
    "extreme size",
    *AIMED,
)


def hidden_states(
    random: np.random.Generator, head: Head, screen: str, count: int
) -> tuple[Array, Array]:
    """Hidden states [count, d] fp32 of all kinds in one batch, and their kinds [count].

    States aimed at the losses of a probabilistic tier are left out: such a tier promises something
    about hidden states that do not depend on its coins.
    """
    kinds = HIDDEN_KINDS[: -len(AIMED)] if screen in PROBABILISTIC else HIDDEN_KINDS
    chosen = random.integers(0, len(kinds), count)
    columns = head.wide.shape[1]
    result = np.empty((count, columns))
    for number, kind in enumerate(kinds):
        own = chosen == number
        if own.any():
            result[own] = _MAKERS[kind](random, head, screen, int(own.sum()))
    with np.errstate(over="ignore"):
        hidden = result.astype(np.float32)
    hidden[~np.isfinite(hidden).all(axis=1)] = 0.0
    return hidden, np.array(kinds)[chosen]


def _gained(random: np.random.Generator, head: Head, states: Array, low: float, high: float) -> Any:
    """``states`` [n, d] scaled so that typical logits lie between 10**low and 10**high."""
    typical = max(float(np.median(np.linalg.norm(head.wide, axis=1))), 1e-44)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(states, axis=1, keepdims=True)
        unit = np.divide(states, lengths, out=np.zeros_like(states), where=lengths > 0)
        return unit * (10.0 ** random.uniform(low, high, (len(states), 1)) / typical)


def _random(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    states = random.standard_normal((count, head.wide.shape[1]))
    return _gained(random, head, states, -0.5, 2.0)


def _flat(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    states = random.standard_normal((count, head.wide.shape[1]))
    return _gained(random, head, states, -9, -0.5) * (random.random((count, 1)) < 0.95)


def _along_row(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    rows = head.wide[random.integers(0, len(head.wide), count)]
    return _gained(random, head, rows, -0.5, 2.0)


def _along_difference(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    first, second = random.integers(0, len(head.wide), (2, count))
    return _gained(random, head, head.wide[first] - head.wide[second], -0.5, 2.0)


def _outlier(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    states = random.standard_normal((count, head.wide.shape[1]))
    states[np.arange(count), random.integers(0, states.shape[1], count)] *= 100.0
    return _gained(random, head, states, -0.5, 2.0)


def _rounding_edge(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    """16-bit integers plus almost a half in the direction of a row: every rounding goes astray."""
    rows = head.wide[random.integers(0, len(head.wide), count)]
    largest = 10.0 ** random.uniform(0.5, 4.5, (count, 1))
    integers = np.rint(random.uniform(-1.0, 1.0, rows.shape) * np.minimum(largest, 32000.0))
    states = integers + 0.499 * np.sign(rows) * random.choice([-1.0, 1.0], (count, 1))
    states[np.arange(count), random.integers(0, rows.shape[1], count)] = 32767.0
    typical = max(float(np.median(np.linalg.norm(head.wide, axis=1))), 1e-44)
    with np.errstate(over="ignore"):
        return np.asarray(states * (2.0 ** random.integers(-16, -8, (count, 1)) / typical))


def _extreme(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    states = random.standard_normal((count, head.wide.shape[1]))
    return states * 10.0 ** random.choice([-44.0, -40.0, -20.0, 10.0, 18.0, 30.0], (count, 1))


def _aimed_loss(head: Head, screen: str, random: np.random.Generator) -> Array:
    """The losses [V, d] that hidden states of this screen are aimed at."""
    if screen == "int4":
        return head.losses[random.choice(["int4", "int4 fine"])]
    return head.losses[screen if screen in head.losses else "int8"]


def _along_loss(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    rows = random.integers(0, len(head.wide), count)
    return _gained(random, head, _aimed_loss(head, screen, random)[rows], 0.0, 3.5)


def _near_tie(random: np.random.Generator, head: Head, screen: str, count: int) -> Array:
    first = random.integers(0, len(head.wide), count)
    loss = _aimed_loss(head, screen, random)
    blend = 10.0 ** random.uniform(-1.0, 1.0, count)
    return _gained(random, head, near_ties(head.wide, loss, first, blend, 1e-6), 0.0, 3.5)


def near_ties(wide: Array, loss: Array, first: Array, blend: Array, gap: float) -> Array:
    """States [n, d] in which row ``first`` [n] beats its nearest row by ``gap`` of its length.

    They lie along the difference of the two rows' losses, which a screen sees as far from the
    truth as it ever may, plus ``blend`` [n] times as much along the rows themselves, which keeps
    the other rows away.
    """
    with np.errstate(all="ignore"):
        unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-300)
        likeness = unit[first] @ unit.T
        # Exact copies never differ: the nearest that is not one.
        likeness[likeness > 1.0 - 1e-12] = -np.inf
        second = likeness.argmax(axis=1)
        lost = loss[first] - loss[second]
        middle = unit[first] + unit[second]
        size = np.linalg.norm(lost, axis=1) / np.maximum(np.linalg.norm(middle, axis=1), 1e-300)
        states = lost + (blend * size)[:, None] * middle
        between = wide[first] - wide[second]
        length = np.maximum(np.square(between).sum(axis=1), 1e-300)
        wanted = gap * np.linalg.norm(states, axis=1) * np.linalg.norm(wide[first], axis=1)
        missing = wanted - np.einsum("nd,nd->n", between, states)
        return np.nan_to_num(states + (missing / length)[:, None] * between)


Maker = Callable[[np.random.Generator, Head, str, int], Array]
_MAKERS: dict[str, Maker] = {
    "random": _random,
    "flat": _flat,
    "along a row": _along_row,
    "along a difference": _along_difference,
    "outlier channel": _outlier,
    "rounding edge": _rounding_edge,
    "extreme size": _extreme,
    "along the loss": _along_loss,
    "near tie, along two losses": _near_tie,
}


# -- needs ----------------------------------------------------------------------------------------

KINDS = ("greedy", "gumbel", "topk", "minp", "nucleus", "epsilon")


@dataclass(frozen=True, slots=True, eq=False)
class NeedBatch:
    """Needs of N rows over one vocabulary, with all their noise."""

    needs: tuple[Need, ...]
    kinds: Array  # [N] of KINDS
    adjusted: Array  # [N] bool: whether there are processors
    noise: Array  # [N, V] fp32, 0 for greedy rows
    controls: Controls  # for certified rows: top-p is done

    def take(self, rows: Array) -> NeedBatch:
        return NeedBatch(
            tuple(self.needs[row] for row in rows.tolist()),
            self.kinds[rows],
            self.adjusted[rows],
            self.noise[rows],
            Controls._make(field[rows] for field in self.controls),
        )


def random_adjustment(random: np.random.Generator, size: int) -> Adjustment:
    """Penalties, biases, bans and, at times, an allow list."""

    def some(most: int) -> Array:
        count = int(random.integers(0, most))
        return np.array(sorted(set(random.integers(0, size, count).tolist())), np.int32)

    tables, bias = np.zeros((2, size), np.int32), some(6)
    seen = some(40)
    tables[1, seen] = random.integers(1, 5, len(seen))
    return Adjustment(
        repetition=float(random.choice([1.0, 1.3, 0.7])),
        frequency=float(random.choice([0.0, 0.5, -0.3])),
        presence=float(random.choice([0.0, 0.9, -1.1])),
        tables=tables,
        table=1,
        bias_ids=bias,
        bias_values=random.choice([-100.0, 0.3, 5.0], len(bias)).astype(np.float32),
        banned=some(6),
        allowed=some(60) if random.random() < 0.1 else None,
    )


def random_needs(
    random: np.random.Generator,
    size: int,
    count: int,
    *,
    kinds: Sequence[str] = KINDS,
    shares: Sequence[float] = (0.3, 0.34, 0.2, 0.15, 0.005, 0.005),
    adjusted: float = 0.08,
) -> NeedBatch:
    """``count`` needs, ``kinds`` in ``shares``, a share of them ``adjusted``."""
    chosen = random.choice(list(kinds), count, p=list(shares))
    most = max(size // 8, 2)
    needs = []
    for kind in chosen.tolist():
        name = {"greedy": "top1", "gumbel": "top1"}.get(kind, kind)
        inverse = float(
            np.float32(1.0 / random.choice([1e-4, 0.05, 0.7, 0.7, 1.0, 1.0, 2.0, 50.0]))
        )
        needs.append(
            Need(
                kind=name,
                k=int(random.integers(1, min(most, 60) + 1)) if kind == "topk" else 0,
                min_p=float(random.choice([1e-4, 0.05, 0.5, 1.0])) if kind == "minp" else 0.0,
                top_p=float(random.choice([0.1, 0.5, 0.9, 0.999])) if kind == "nucleus" else 1.0,
                epsilon=float(random.choice([1e-6, 1e-2, 0.3])) if kind == "epsilon" else 0.0,
                key=int(random.integers(0, 2**64, dtype=np.uint64)),
                position=int(random.integers(0, 1 << 20)),
                inverse_temperature=0.0 if kind == "greedy" else inverse,
                adjustment=random_adjustment(random, size) if random.random() < adjusted else None,
            )
        )
    return with_noise(needs, chosen, size)


def with_noise(needs: Sequence[Need], kinds: Array, size: int) -> NeedBatch:
    noise = np.zeros((len(needs), size), np.float32)
    for row, need in enumerate(needs):
        if need.inverse_temperature:
            noise[row] = gumbel_row(need.key, need.position, size)
    logarithms = [np.log(need.min_p) if need.min_p else -np.inf for need in needs]
    controls = Controls(
        inverse_temperature=np.array([need.inverse_temperature for need in needs]),
        top_k=np.array([need.k for need in needs], np.int64),
        top_p=np.ones(len(needs)),
        log_min_p=np.array(logarithms),
        key=np.array([need.key for need in needs], np.uint64),
        position=np.array([need.position for need in needs], np.uint64),
    )
    adjusted = np.array([need.adjustment is not None for need in needs])
    return NeedBatch(tuple(needs), kinds, adjusted, noise, controls)


# -- the oracle -----------------------------------------------------------------------------------


def adjusted_logits(raw: Array, adjustment: Adjustment) -> Array:
    """The processors of one row on all its logits [V], as `Adjustment` states them."""
    logits = raw.copy()
    logits[adjustment.bias_ids] += adjustment.bias_values
    assert adjustment.tables is not None
    table = adjustment.tables[adjustment.table, : len(logits)]
    repetition = np.float32(adjustment.repetition)
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    logits = np.where(table > 0, repeated, logits)
    lowered = logits - np.float32(adjustment.frequency) * (table - 1).astype(np.float32)
    logits = np.where(table > 1, lowered - np.float32(adjustment.presence), logits)
    excluded = np.zeros(len(logits), np.bool_)
    excluded[adjustment.banned] = True
    if adjustment.allowed is not None:
        allowed = np.zeros(len(logits), np.bool_)
        allowed[adjustment.allowed] = True
        excluded |= ~allowed
    logits[excluded] = -np.inf
    return logits


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What is right for N rows, by brute force."""

    raw: Array  # [N, V] canonical
    logits: Array  # [N, V] after the processors
    wanted: Array  # [N, V] bool: the set that the need asks for (empty for epsilon)
    token: Array  # [N] what must be drawn, -1 where nothing is left


def truth(raw: Array, batch: NeedBatch) -> Truth:
    """The answers for raw canonical logits [N, V]: every token, every noise, sorts."""
    logits = raw.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for row in np.flatnonzero(batch.adjusted).tolist():
            adjustment = batch.needs[row].adjustment
            assert adjustment is not None
            logits[row] = adjusted_logits(raw[row], adjustment)
    wanted = np.zeros(raw.shape, np.bool_)
    token = np.full(len(raw), -1, np.int64)
    inverse = batch.controls.inverse_temperature
    left = logits.max(axis=1) > -np.inf
    for kind in KINDS:
        rows = np.flatnonzero((batch.kinds == kind) & left)
        if not len(rows):
            continue
        own = logits[rows]
        if kind == "greedy":
            token[rows] = own.argmax(axis=1)
            wanted[rows, token[rows]] = True
            continue
        scaled = own.astype(np.float64) * inverse[rows, None]
        scores = scaled + batch.noise[rows]
        if kind == "gumbel":
            token[rows] = scores.argmax(axis=1)
            wanted[rows, token[rows]] = True
            continue
        if kind == "topk":
            kept = _top_k(own, batch.controls.top_k[rows])
        elif kind == "minp":
            least = scaled.max(axis=1) + batch.controls.log_min_p[rows]
            kept = (scaled >= least[:, None]) & (own > -np.inf)
        elif kind == "nucleus":
            kept = np.stack(
                [
                    truncate(logits[row], inverse[row], 0, batch.needs[row].top_p, -np.inf)
                    for row in rows.tolist()
                ]
            )
        else:
            continue
        wanted[rows] = kept
        token[rows] = np.where(kept, scores, -np.inf).argmax(axis=1)
    return Truth(raw, logits, wanted, token)


def _top_k(logits: Array, counts: Array) -> Array:
    """The ``counts`` [n] best of each row, lower ids first among equals."""
    size = logits.shape[1]
    ordered = np.sort(logits, axis=1)
    place = np.maximum(size - counts, 0)
    edge = np.take_along_axis(ordered, place[:, None], axis=1)
    better, equal = logits > edge, logits == edge
    room = np.minimum(counts, size) - better.sum(axis=1)
    kept = better | (equal & (np.cumsum(equal, axis=1) <= room[:, None]))
    return kept & (logits > -np.inf)


def violations(right: Truth, batch: NeedBatch, found: Candidates) -> Array:
    """Per row [N] an empty string, or what is wrong with the candidates ``found``."""
    count, _ = right.logits.shape
    wrong = np.full(count, "", "<U40")
    rows = np.repeat(np.arange(count), np.diff(found.offsets))
    held = np.zeros(right.logits.shape, np.bool_)
    held[rows, found.ids] = True
    for name, exact, given in (
        ("logits differ", right.logits, found.logits),
        ("raw logits differ", right.raw, found.raw),
    ):
        same = exact[rows, found.ids].view(np.int32) == given.view(np.int32)
        wrong[rows[~same]] = name
    wrong[(right.wanted & ~held).any(axis=1)] = "a wanted token is missing"
    dense = np.array([certificate.guarantee == "dense" for certificate in found.certificates])
    nucleus = (batch.kinds == "nucleus") & ~dense
    wrong[nucleus & (right.wanted != held).any(axis=1)] = "not the nucleus"
    for row in np.flatnonzero((batch.kinds == "epsilon") & ~dense).tolist():
        if outside_share(right.logits[row], held[row], batch.needs[row]) > batch.needs[row].epsilon:
            wrong[row] = "more than epsilon outside"
    # Rows that need all logits leave top-p to the draw.
    top_p = np.array([need.top_p if d else 1.0 for need, d in zip(batch.needs, dense, strict=True)])
    drawn = draw(found.ids, found.logits, found.offsets, batch.controls._replace(top_p=top_p))
    differs = (drawn != right.token) & (batch.kinds != "epsilon")
    wrong[differs & (wrong == "")] = "another token is drawn"
    return wrong


def outside_share(logits: Array, held: Array, need: Need) -> float:
    """The share of the softmax outside of ``held`` [V], less what float64 may be off by."""
    scaled = logits.astype(np.float64) * need.inverse_temperature
    top = scaled.max()
    with np.errstate(invalid="ignore"):  # inf - inf, where the answer is 0
        masses = np.exp(np.where(scaled == top, 0.0, scaled - top))
    return float(masses[~held].sum() / masses.sum()) * (1.0 - 1e-11)


# -- many rows ------------------------------------------------------------------------------------


def tally_counter() -> Counter[str]:
    return Counter()


@dataclass(slots=True, eq=False)
class Tally:
    """How many rows were decided with a certificate, of which kinds, and what was wrong.

    Rows whose every logit was computed have nothing to certify: they are judged, but not counted
    as ``certified``.
    """

    certified: int = 0
    dense: int = 0
    adjusted: int = 0
    kinds: Counter[str] = field(default_factory=tally_counter)
    flavours: Counter[str] = field(default_factory=tally_counter)
    hidden: Counter[str] = field(default_factory=tally_counter)
    tiers: Counter[str] = field(default_factory=tally_counter)
    chance: float = 0.0  # union bound of all certificates' failure probabilities
    wrong: list[str] = field(default_factory=list)

    def report(self) -> str:
        parts = [
            f"{self.certified} certified positions ({self.adjusted} with processors), "
            f"{self.dense} more dense ones, {len(self.wrong)} violations, "
            f"chance of one {self.chance:.1e}"
        ]
        for counter in (self.tiers, self.kinds, self.hidden, self.flavours):
            parts.append(", ".join(f"{name} {count}" for name, count in sorted(counter.items())))
        return "\n  ".join(parts)


def judge(
    head: Head,
    shard: OutputHead,
    hidden: Array,
    hidden_kinds: Array,
    batch: NeedBatch,
    tally: Tally,
    name: str = "",
) -> None:
    """Decides every row with ``shard`` and by brute force, and books the comparison."""
    found = shard.rescore(shard.screen(hidden, batch.needs))
    wrong = violations(truth(head.canonical(hidden), batch), batch, found)
    for row in np.flatnonzero(wrong != "").tolist():
        certificate = found.certificates[row]
        tally.wrong.append(
            f"{name} {head.flavour} {tuple(head.weight.shape)} row {row}: {wrong[row]} "
            f"({batch.kinds[row]}, {hidden_kinds[row]}, {certificate.tier})"
        )
    certified = np.array([each.guarantee != "dense" for each in found.certificates])
    own = [each for each in found.certificates if each.guarantee != "dense"]
    for each in own:
        assert (each.guarantee == "probabilistic") == (each.tier in PROBABILISTIC)
        tally.chance += each.failure_probability
    tally.dense += len(certified) - len(own)
    tally.certified += len(own)
    tally.adjusted += int(np.count_nonzero(certified & batch.adjusted))
    tally.flavours[head.flavour] += len(own)
    tally.tiers.update(each.tier for each in own)
    tally.kinds.update(batch.kinds[certified].tolist())
    tally.hidden.update(hidden_kinds[certified].tolist())


def judge_many(screen: str, wanted: int, seed: int, first: int = 0) -> Tally:
    """Positions on head after head, from number ``first``, until ``wanted`` are certified."""
    random = np.random.default_rng([seed, SCREENS.index(screen)])
    tally = Tally()
    number = first
    while tally.certified < wanted:
        head, shard = numbered_head(number), numbered_head(number).shard(screen)
        size = len(head.wide)
        rows = int(np.clip(100_000 // size, 32, 512))
        needs = random_needs(random, size, rows)
        for round_number in range(12):
            batch = needs.take(random.permutation(rows))
            hidden, kinds = hidden_states(random, head, screen, rows)
            # A crowded screen is left alone for a while: most of the time it is to go on here.
            if screen != DENSE and round_number > 0:
                shard.start_with(CHOICES[screen])
            for part in _parts(random, rows) if screen == "switching" else [np.arange(rows)]:
                judge(head, shard, hidden[part], kinds[part], batch.take(part), tally, screen)
        number += 1
    return tally


def _parts(random: np.random.Generator, rows: int) -> list[Array]:
    """Steps of 1 to 120 rows."""
    cuts = np.cumsum(random.choice([1, 20, 40, 70, 120], 2 + rows // 20))
    return [part for part in np.split(np.arange(rows), cuts[cuts < rows]) if len(part)]
