"""Logits in every layout, controls and adjustments that are hard on decisions."""

from __future__ import annotations

import math

import numpy as np

from lexshard.actors.states.need import Adjustment
from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import Adjustments
from tests.support.search_cases import random_adjustment

FLAVOURS = ["plain", "narrow", "coarse", "special", "equal", "mostly excluded", "huge", "peaked"]
LAYOUTS = ["row-major", "vocabulary-major", "padded rows"]
SIZES = [1, 7, 64, 65, 200, 1000, 5000]


def random_logits(random: np.random.Generator, flavour: str, rows: int, size: int) -> np.ndarray:
    logits = (3 * random.standard_normal((rows, size))).astype(np.float32)
    if flavour == "narrow":
        return logits * np.float32(0.02)
    if flavour == "coarse":
        return logits.round(0)
    if flavour == "special":
        values = np.array([-np.inf, np.inf, -3, -0.0, 0.0, 0.5, 2], np.float32)
        return random.choice(values[random.integers(0, 2) :], logits.shape)
    if flavour == "equal":
        return np.full_like(logits, random.choice([-2.0, 0.0, 7.0]))
    if flavour == "mostly excluded":
        logits[random.random(logits.shape) < 0.95] = -np.inf
    if flavour == "huge":
        return logits * np.float32(1e37)
    if flavour == "peaked":
        logits[random.random(logits.shape) < 3 / size] += 15
    return logits


def laid_out(layout: str, logits: np.ndarray) -> np.ndarray:
    """``logits`` [B, V] in the given layout."""
    rows, size = logits.shape
    if layout == "row-major":
        return logits
    if layout == "vocabulary-major":
        return np.asfortranarray(logits)
    view = np.full((rows, size + 7), 99, np.float32)[:, 2 : 2 + size]
    view[:] = logits
    return view


def random_adjustments(random: np.random.Generator, rows: int, size: int) -> Adjustments:
    """Of some rows; bits beyond the vocabulary may be set in masks, and are never drawn."""
    made: list[Adjustment | None] = [None] * rows
    for row in np.flatnonzero(random.random(rows) < 0.7).tolist():
        own = random_adjustment(random, size)
        if own.mask is not None and size % 64:
            own.mask.words[-1] |= np.uint64(1) << np.uint64(63)
        made[row] = own
    return flatten_adjustments(made)


def no_adjustments(rows: int) -> Adjustments:
    """Rows without any adjustment, whose penalties would be those given by ``_replace``."""
    return flatten_adjustments([None] * rows)


def random_controls(random: np.random.Generator, rows: int) -> Controls:
    def some(values: np.ndarray | float, off: float) -> np.ndarray:
        return np.where(random.random(rows) < 0.5, values, off)

    min_p = some(random.choice([random.random(), 0.05, 1e-9, 1.0], rows), 0.0)
    return Controls(
        inverse_temperature=random.choice(
            np.array([0, 1, 0.25, 10, 1 / 0.7], np.float32), rows
        ).astype(np.float64),
        top_k=some(random.choice([1, 2, 17, 50, 700], rows), 0).astype(np.int64),
        top_p=some(random.choice([random.random(), 0.5, 0.95, 1e-6, 1 - 1e-9], rows), 1.0),
        log_min_p=np.array([math.log(each) if each > 0 else -math.inf for each in min_p]),
        key=random.integers(0, 2**64, rows, dtype=np.uint64),
        position=random.integers(0, 2**32, rows).astype(np.uint64),
    )


def constant_controls(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    key: int = 7,
) -> Controls:
    """The same controls for all rows, at the positions 0, 1, 2 ..."""
    return Controls(
        np.full(rows, np.float32(1 / temperature), np.float64),
        np.full(rows, top_k),
        np.full(rows, top_p),
        np.full(rows, math.log(min_p) if min_p > 0 else -math.inf),
        np.full(rows, key, np.uint64),
        np.arange(rows).astype(np.uint64),
    )
