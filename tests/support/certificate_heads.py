"""Heads and hidden states that are hard on certificates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lexshard.actors.head.ladder import Choices, Ladder
from lexshard.actors.head.screens import DENSE, Linear
from lexshard.actors.head.shard import Shard
from lexshard.kernels.linear import pack
from lexshard.kernels.quantize import Int4Tier, Kind, Tier, quantize
from lexshard.kernels.rows import canonical_logits, postprocess
from tests.support.cluster_cases import flavoured_weight

Array = np.ndarray[Any, Any]

FLAVOURS = (
    "random",
    "clustered",
    "duplicates",
    "coarse",
    "zero",
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
        post, multiplied = (self.softcap, self.scale), linear or pack(self.weight)
        return Shard(self.weight, self.bias, *post, size, linear=multiplied, ladder=ladder)

    def canonical(self, hidden: Array) -> Array:
        """Every raw canonical logit [N, V] of ``hidden`` [N, d]."""
        raw = canonical_logits(hidden, self.weight)
        bias = None if self.bias is None else self.bias.numpy()
        return np.asarray(postprocess(raw, bias=bias, scale=self.scale, softcap=self.softcap))


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
            result[own] = _states(random, head, screen, kind, int(own.sum()))
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


def _states(random: np.random.Generator, head: Head, screen: str, kind: str, count: int) -> Array:
    """States [count, d] of one kind, float64."""
    wide = head.wide
    some = random.standard_normal((count, wide.shape[1]))
    first, second = random.integers(0, len(wide), (2, count))
    if kind == "flat":
        return _gained(random, head, some, -9, -0.5) * (random.random((count, 1)) < 0.95)
    if kind == "rounding edge":
        return _rounding_edge(random, head, first)
    if kind == "extreme size":
        return some * 10.0 ** random.choice([-44.0, -40.0, -20.0, 10.0, 18.0, 30.0], (count, 1))
    if kind in AIMED:
        loss = _aimed_loss(head, screen, random)
        if kind == "along the loss":
            states = loss[first]
        else:
            blend = 10.0 ** random.uniform(-1.0, 1.0, count)
            states = near_ties(wide, loss, first, blend, 1e-6)
        return _gained(random, head, states, 0.0, 3.5)
    if kind == "along a row":
        some = wide[first]
    elif kind == "along a difference":
        some = wide[first] - wide[second]
    elif kind == "outlier channel":
        some[np.arange(count), random.integers(0, some.shape[1], count)] *= 100.0
    return _gained(random, head, some, -0.5, 2.0)


def _rounding_edge(random: np.random.Generator, head: Head, which: Array) -> Array:
    """16-bit integers plus almost a half in the direction of rows ``which``: every rounding goes
    astray."""
    rows, count = head.wide[which], len(which)
    largest = 10.0 ** random.uniform(0.5, 4.5, (count, 1))
    integers = np.rint(random.uniform(-1.0, 1.0, rows.shape) * np.minimum(largest, 32000.0))
    states = integers + 0.499 * np.sign(rows) * random.choice([-1.0, 1.0], (count, 1))
    states[np.arange(count), random.integers(0, rows.shape[1], count)] = 32767.0
    typical = max(float(np.median(np.linalg.norm(head.wide, axis=1))), 1e-44)
    with np.errstate(over="ignore"):
        return np.asarray(states * (2.0 ** random.integers(-16, -8, (count, 1)) / typical))


def _aimed_loss(head: Head, screen: str, random: np.random.Generator) -> Array:
    """The losses [V, d] that hidden states of this screen are aimed at."""
    if screen == "int4":
        return head.losses[random.choice(["int4", "int4 fine"])]
    return head.losses[screen if screen in head.losses else "int8"]


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
