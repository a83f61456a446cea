"""Random rows, processors, needs and estimates, and what a search must find."""

from __future__ import annotations

import numpy as np

from lexshard.actors.states.mask import Mask
from lexshard.actors.states.need import Adjustment, Need
from lexshard.kernels.noise.reference import gumbel_noise
from lexshard.kernels.search import Estimates, block_slack
from lexshard.kernels.truncate.reference import best_ids


def canonical_row(random: np.random.Generator, size: int, flavour: str) -> np.ndarray:
    logits = (4 * random.standard_normal(size)).astype(np.float32)
    if flavour == "ties":
        return logits.round(0)
    if flavour == "zero":
        return np.zeros(size, np.float32)
    if flavour == "huge":
        return logits * np.float32(1e30)
    if flavour == "duplicates":
        return logits[random.integers(0, max(size // 3, 1), size)]
    return logits


def random_adjustment(random: np.random.Generator, size: int) -> Adjustment:
    """Histories of few tokens or of all, in tables a bit wider than the vocabulary; biases, bans
    and, at times, a mask."""

    def some(*shares: float) -> np.ndarray:
        return np.flatnonzero(random.random(size) < random.choice(shares)).astype(np.int32)

    tables = random.integers(1, 5, (int(random.integers(1, 4)), size + int(random.integers(0, 9))))
    tables *= random.random(tables.shape) < random.choice([0.0, 0.02, 0.3, 1.0])
    bias = some(0.0, 0.01, 0.1)
    return Adjustment(
        repetition=float(random.choice([1.0, 1.3, 0.7])),
        frequency=float(random.choice([0.0, 0.5, -0.3])),
        presence=float(random.choice([0.0, 0.9, -1.1])),
        tables=tables.astype(np.int32),
        table=int(random.integers(-1, len(tables))),
        bias_ids=bias,
        bias_values=random.choice([-100.0, -1.5, 0.3, 5.0], len(bias)).astype(np.float32),
        banned=some(0.05),
        mask=Mask.of_ids(some(0.01, 0.1, 0.5, 0.95), size) if random.random() < 0.2 else None,
    )


def random_need(
    random: np.random.Generator, size: int, most: int | None = None, adjusted: float = 0.5
) -> Need:
    """Any kind of need; ``most`` limits its ``k``, ``adjusted`` is the share with processors."""
    kind = random.choice(["greedy", "top1", "topk", "minp"])
    return Need(
        kind="top1" if kind == "greedy" else kind,
        k=int(random.integers(1, (most or size) + 3)),
        min_p=float(random.choice([1e-6, 0.05, 0.5, 1.0])),
        key=int(random.integers(0, 2**64, dtype=np.uint64)),
        position=int(random.integers(0, 1000)),
        inverse_temperature=0.0
        if kind == "greedy"
        else float(np.float32(random.choice([0.5, 1.0, 1 / 0.7, 20.0]))),
        adjustment=random_adjustment(random, size) if random.random() < adjusted else None,
    )


def estimates_of(
    random: np.random.Generator, canonical: np.ndarray, width: float, slack_factor: float
) -> Estimates:
    """Estimates that err by up to ``slack_factor`` times less than they say, some of them fully."""
    rows, size = canonical.shape
    scale = width * np.abs(canonical).max(axis=1).astype(np.float64)
    row_slack = random.random((2, size)).astype(np.float32)
    hidden_slack = np.stack([scale * random.random(rows) for _ in range(3)], axis=1)
    slack = hidden_slack[:, :2] @ row_slack.astype(np.float64) + hidden_slack[:, 2:]
    padded = np.full((rows, size + int(random.integers(0, 70))), 1e38, np.float32)
    error = random.choice([-1.0, 1.0, 0.3], (rows, size)) * slack
    padded[:, :size] = canonical + error * (1 - 1e-6)
    hidden_slack[:, 2] += np.abs(canonical).max(axis=1) * 2.0**-22
    return Estimates(padded, row_slack, slack_factor * hidden_slack, block_slack(row_slack))


def answer(need: Need, ids: np.ndarray, logits: np.ndarray) -> list[int]:
    """The tokens that a need is about, in order, by brute force over the given ones."""
    ids, logits = ids[logits > -np.inf], logits[logits > -np.inf]
    if not len(ids):
        return []
    scaled = logits.astype(np.float64) * need.inverse_temperature
    if need.kind == "topk":
        return ids[best_ids(logits, need.k)].tolist()
    if need.kind == "minp":
        return ids[scaled >= scaled.max() + np.log(need.min_p)].tolist()
    if need.inverse_temperature == 0:
        return [int(ids[np.argmax(logits)])]
    noise = gumbel_noise(need.key, need.position, ids)
    return [int(ids[np.argmax(scaled + noise)])]
