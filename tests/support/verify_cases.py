"""Batches of drafts that are hard on verification, and chains of tokens whose law is known."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch

from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.verify import DenseProposals, DraftedRows, SparseProposals, Verdict, verify
from lexshard.kernels.verify.types import Proposals
from tests.support.decision_cases import random_logits

KINDS = ("certain", "sparse", "dense", "close", "equal")


def random_rows(
    random: np.random.Generator, sequences: int, longest: int, size: int
) -> DraftedRows:
    """Ragged sequences of up to ``longest`` drafts, any temperatures, keys and positions."""
    offsets = np.cumsum([0, *random.integers(1, longest + 2, sequences)], dtype=np.int64)
    return DraftedRows(
        offsets,
        random.integers(0, size, offsets[-1] - sequences),
        random.choice([0.0, 1.0, float(np.float32(1 / 0.7)), 0.25], sequences),
        random.integers(0, 2**64, sequences, dtype=np.uint64),
        random.integers(0, 2**31, sequences, dtype=np.uint64),
    )


def rows_with_drafts(rows: DraftedRows) -> np.ndarray:
    """The rows of the target that test a draft, in the order of the drafts."""
    return np.setdiff1d(np.arange(rows.offsets[-1]), rows.offsets[1:] - 1)


def proposals_for(
    random: np.random.Generator, kind: str, logits: np.ndarray, rows: DraftedRows
) -> tuple[DraftedRows, Proposals]:
    """Proposals of a kind, and the rows with drafts that these could have made."""
    own = logits[rows_with_drafts(rows)]
    drafts = rows.drafts
    if kind == "certain" or not len(drafts):
        return rows, None
    if kind == "sparse":
        lists = [
            np.union1d(random.integers(0, own.shape[1], random.integers(1, 6)), [draft])
            for draft in drafts
        ]
        weights = [random.random(len(each)) ** 4 + 1e-30 for each in lists]
        return rows, SparseProposals(
            np.concatenate(lists).astype(np.int32),
            np.concatenate([each / each.sum() for each in weights]),
            np.cumsum([0, *map(len, lists)], dtype=np.int64),
        )
    if kind == "equal":
        proposed = own.copy()
    elif kind == "close":
        proposed = own + (0.2 * random.standard_normal(own.shape)).astype(np.float32)
    else:
        proposed = random_logits(random, random.choice(["plain", "peaked"]), *own.shape)
    scores = proposed.astype(np.float64) + random.gumbel(size=own.shape)
    scale = np.maximum(rows.inverse_temperature, 0.25)
    # A row that excludes everything has no draft of its own: any token may stand there.
    drafted = np.where(scores.max(axis=1) > -np.inf, scores.argmax(axis=1), drafts)
    return rows._replace(drafts=drafted), DenseProposals(proposed, scale)


def assert_same(found: Verdict, expected: Verdict) -> None:
    assert np.asarray(found.accepted).tolist() == expected.accepted.tolist()
    assert np.asarray(found.tokens).tolist() == expected.tokens.tolist()


def check_triton(device: str, cases: tuple[tuple[str, str, str, int], ...]) -> None:
    """The reference's verdict in every case: flavour of logits, mode, kind of proposals, size."""
    for seed, (flavour, mode, kind, size) in enumerate(cases):
        random = np.random.default_rng(seed)
        rows = random_rows(random, 2, 2, size)
        logits = random_logits(random, flavour, int(rows.offsets[-1]), size)
        rows, proposals = proposals_for(random, kind, logits, rows)
        if mode != "exact":
            proposals = None
        expected = verify(logits, rows, mode=mode, proposals=proposals, implementation="reference")
        if isinstance(proposals, DenseProposals):
            placed = torch.from_numpy(proposals.logits).to(device)
            proposals = DenseProposals(placed, proposals.inverse_temperature)
        placed = torch.from_numpy(logits).to(device)
        found = verify(placed, rows, mode=mode, proposals=proposals, implementation="triton")
        answer = Verdict(found.accepted.cpu().numpy(), found.tokens.cpu().numpy())
        assert_same(answer, expected)


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
        if kind == "sparse":  # the three best
            logits = np.where(logits >= np.sort(logits, axis=1)[:, -3:-2], logits, -np.inf)
            logits = logits.astype(np.float32)
        return (logits + self.noise(position)).argmax(axis=1), logits


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
