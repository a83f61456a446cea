"""The oracle that judges certificates, and the count of what it judged.

It knows nothing of screens: it has every canonical logit of every row, applies processors
and noise to all of them and decides by sorting. Everything is vectorised over many rows, because
the promise is stated in millions of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.build import OutputHead
from lexshard.actors.head.screens import DENSE
from lexshard.actors.messages import MASK_TIER, NUCLEUS_NEEDS
from lexshard.actors.states.need import Adjustment, Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.draw import draw
from lexshard.kernels.truncate.reference import truncate
from tests.support.certificate_heads import (
    CHOICES,
    PROBABILISTIC,
    SCREENS,
    Array,
    Head,
    hidden_states,
    numbered_head,
)
from tests.support.certificate_needs import KINDS, NeedBatch, random_needs


def adjusted_logits(raw: Array, adjustment: Adjustment) -> Array:
    """The processors of one row on all its logits [V], as `Adjustment` states them."""
    logits = raw.copy()
    logits[adjustment.bias_ids] += adjustment.bias_values
    if adjustment.tables is not None and adjustment.table >= 0:
        table = adjustment.tables[adjustment.table, : len(logits)]
        repetition = np.float32(adjustment.repetition)
        repeated = np.where(logits > 0, logits / repetition, logits * repetition)
        logits = np.where(table > 0, repeated, logits)
        lowered = logits - np.float32(adjustment.frequency) * (table - 1).astype(np.float32)
        logits = np.where(table > 1, lowered - np.float32(adjustment.presence), logits)
    excluded = np.zeros(len(logits), np.bool_)
    if adjustment.mask is not None:
        excluded[:] = True
        excluded[adjustment.mask.ids] = False
    excluded[adjustment.banned] = True
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
        elif kind in NUCLEUS_NEEDS:
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
        if kind == "nucleus-draw":
            wanted[rows] = False
            wanted[rows, token[rows]] = True
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
    # Rows whose masks hold few tokens have all of these, and so leave top-p to the draw, too.
    masked = np.array([certificate.tier == MASK_TIER for certificate in found.certificates])
    for row in np.flatnonzero(masked).tolist():
        adjustment = batch.needs[row].adjustment
        assert adjustment is not None
        assert adjustment.mask is not None
        if not np.array_equal(np.flatnonzero(held[row]), adjustment.mask.ids):
            wrong[row] = "not what the mask holds"
    dense |= masked
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
    if top == -np.inf:  # every token is excluded: there is nothing to be outside
        return 0.0
    with np.errstate(invalid="ignore"):  # inf - inf, where the answer is 0
        masses = np.exp(np.where(scaled == top, 0.0, scaled - top))
    return float(masses[~held].sum() / masses.sum()) * (1.0 - 1e-11)


# -- many rows ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Tally:
    """How many rows were decided with a certificate, of which kinds, and what was wrong.

    Rows whose every logit was computed have nothing to certify: they are judged, but not counted
    as ``certified``.
    """

    certified: int = 0
    dense: int = 0
    adjusted: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    flavours: Counter[str] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
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
    found = shard.rescore(shard.screen(hidden, RowTable.of(batch.needs)))
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
