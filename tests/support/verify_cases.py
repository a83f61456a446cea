"""Batches of drafts that are hard on verification, and chains of tokens whose law is known."""

from __future__ import annotations

from copy import copy

import numpy as np

from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.verify import DenseProposals, DraftedRows
from lexshard.kernels.verify.types import Proposals
from tests.support.decision_cases import random_logits

KINDS = ("certain", "few", "dense", "close", "equal")


def random_rows(random: np.random.Generator, count: int, size: int) -> DraftedRows:
    """Any drafts, temperatures, keys and positions."""
    return DraftedRows(
        random.integers(0, size, count),
        random.choice([1.0, float(np.float32(1 / 0.7)), 0.25, 4.0], count),
        random.integers(0, 2**64, count, dtype=np.uint64),
        random.integers(0, 2**31, count, dtype=np.uint64),
    )


def proposals_for(
    random: np.random.Generator, kind: str, logits: np.ndarray, rows: DraftedRows
) -> tuple[DraftedRows, Proposals]:
    """Proposals of a kind, and the rows with drafts that these could have made."""
    if kind == "certain":
        return rows, None
    if kind == "few":
        proposed = np.full_like(logits, -np.inf)
        for row, draft in enumerate(rows.drafts):
            ids = np.append(random.integers(0, logits.shape[1], random.integers(1, 6)), draft)
            proposed[row, ids] = np.log(random.random(len(ids)) ** 4 + 1e-30)
        return rows, DenseProposals(proposed, np.ones(len(proposed)))
    if kind == "equal":
        proposed = logits.copy()
    elif kind == "close":
        proposed = logits + (0.2 * random.standard_normal(logits.shape)).astype(np.float32)
    else:
        proposed = random_logits(random, random.choice(["plain", "peaked"]), *logits.shape)
    scores = proposed.astype(np.float64) + random.gumbel(size=logits.shape)
    # A row that excludes everything has no draft of its own: any token may stand there.
    drafted = np.where(scores.max(axis=1) > -np.inf, scores.argmax(axis=1), rows.drafts)
    return rows._replace(drafts=drafted), DenseProposals(proposed, rows.inverse_temperature)


class Chains:
    """A target and a drafter whose next token depends on the one before alone, so that the law of a
    whole chain is known, and many chains that grow together, one seed each."""

    def __init__(self, seed: int, size: int, count: int) -> None:
        random = np.random.default_rng(seed)
        self.target = (1.3 * random.standard_normal((size, size))).astype(np.float32)
        noise = (1.1 * random.standard_normal((size, size))).astype(np.float32)
        self.drafter = self.target + noise
        self.size = size
        self.keys = random.integers(0, 2**64, count, dtype=np.uint64)

    def part(self, places: np.ndarray) -> Chains:
        """Some of the chains."""
        some = copy(self)
        some.keys = self.keys[places]
        return some

    def noise(self, position: int) -> np.ndarray:
        """The plain noise [count, size], which a drafter may draw with."""
        return np.stack([gumbel_row(int(key), position, self.size) for key in self.keys])

    def draft(self, kind: str, before: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Drafts [count] after the tokens ``before``, and the logits they were drawn with."""
        logits = self.drafter[before]
        if kind == "certain":
            return logits.argmax(axis=1), logits
        if kind == "few":  # the three best
            logits = np.where(logits >= np.sort(logits, axis=1)[:, -3:-2], logits, -np.inf)
            logits = logits.astype(np.float32)
        return (logits + self.noise(position)).argmax(axis=1), logits


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
