"""How many guesses of a draft stand with a head, counted offline over texts the target wrote.

With noise shared by draft and target (`same-token`), a guess stands if it is the token the target
drew. A guess depends on the clusters its step looks at through the best row of each alone, so one
pass over the head answers every number of clusters at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lexshard.actors.drafter.heads import FILLER
from lexshard.kernels.draft.types import DraftHead, Router
from lexshard.kernels.linear import PackedWeight, unpack
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.noise import gumbel_row
from lexshard.loadtest.draft_heads.texts import DraftPositions, Floats

ROWS = 128  # positions at a time

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StandingGuesses:
    """For N positions: how many of the router's best clusters make the guess the drawn token.

    The guess stands with ``k`` clusters where ``least[n] <= k <= most[n]``: enough to hold the
    token, and none yet with a better one. ``looked`` [K + 1] is the mean number of tokens that k
    clusters hold, those that are always looked at counted in. A head without a router has K = 0.
    """

    least: Counts  # [N]
    most: Counts  # [N]
    looked: npt.NDArray[np.float64]  # [K + 1]

    def stand(self, clusters: int) -> npt.NDArray[np.bool_]:
        """[N] which guesses stand with so many clusters."""
        k = min(clusters, len(self.looked) - 1)
        return (self.least <= k) & (k <= self.most)

    def by_step(self, budgets: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
        """`stand` for the clusters of every draft step."""
        return [self.stand(clusters) for clusters in budgets]

    def tokens(self, budgets: Sequence[int]) -> float:
        """Mean number of tokens that a draft step looks at, every step counted alike."""
        last = len(self.looked) - 1
        return float(np.mean([self.looked[min(k, last)] for k in budgets]))


def standing_guesses(
    head: DraftHead,
    positions: DraftPositions,
    vocabulary_size: int,
    progress: Callable[[float], None] = lambda share: None,
) -> StandingGuesses:
    """What the head's guesses at the positions come to. ``vocabulary_size`` is the tokenizer's."""
    rows = unpack(PackedWeight(head.panels, len(head.ids), positions.hidden.shape[1]))
    bounds = head.offsets.astype(np.int64) * PANEL
    sizes = np.add.reduceat(head.ids != FILLER, bounds[:-1]).astype(np.int64)
    least, most, looked = [], [], []
    for some in blocks(len(positions), ROWS):
        block = positions.of(some)
        best, tokens = _best_of_clusters(head, rows, bounds, block, vocabulary_size)
        rank = _ranks(head, block)
        low, high = _range(best, tokens, rank, block.drawn)
        least.append(low)
        most.append(high)
        looked.append(_sizes_by_count(rank, sizes).sum(axis=0))
        progress(len(block) / len(positions))
    return StandingGuesses(
        np.concatenate(least), np.concatenate(most), np.sum(looked, axis=0) / len(positions)
    )


def blocks(count: int, size: int) -> Iterator[slice]:
    """``count`` places in slices of ``size``."""
    return (slice(first, first + size) for first in range(0, count, size))


def _best_of_clusters(
    head: DraftHead,
    rows: torch.Tensor,
    bounds: Counts,
    block: DraftPositions,
    vocabulary_size: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Score and token of the best row of every cluster: two [n, M]."""
    logits = (torch.from_numpy(block.hidden) @ rows.T).numpy().astype(np.float64)
    scaled = block.inverse_temperature > 0
    logits[scaled] *= block.inverse_temperature[scaled, None]
    for row in np.flatnonzero(scaled):
        noise = gumbel_row(int(block.key[row]), int(block.place[row]), vocabulary_size)
        logits[row] += noise[head.ids]
    logits[:, head.ids == FILLER] = -np.inf
    clusters = len(bounds) - 1
    best = np.empty((len(block), clusters))
    tokens = np.empty((len(block), clusters), np.int32)
    each = np.arange(len(block))
    for cluster in range(clusters):
        own = slice(bounds[cluster], bounds[cluster + 1])
        winner = logits[:, own].argmax(axis=1)  # the first of equals: ids ascend in a cluster
        best[:, cluster] = logits[:, own][each, winner]
        tokens[:, cluster] = head.ids[own][winner]
    return best, tokens


def _ranks(head: DraftHead, block: DraftPositions) -> Counts:
    """[n, M] how many clusters are looked at before this one is: 0 for those always are."""
    clusters = len(head.offsets) - 1
    if head.router is None:
        return np.zeros((len(block), clusters), np.int64)
    scores = router_scores(head.router, block.embedded, block.before)
    scores[:, head.always] = -np.inf
    rank = np.empty((len(block), clusters), np.int64)
    order = np.argsort(-scores, axis=1, kind="stable")
    np.put_along_axis(rank, order, np.arange(1, clusters + 1)[None], axis=1)
    rank[:, head.always] = 0
    return rank


def router_scores(router: Router, embedded: Floats, before: Floats) -> Floats:
    """Scores [N, M] of the clusters from embeddings and hidden states before, [N, d] each."""
    width, depth = len(router.inner_bias), 2 * embedded.shape[1]
    inner = unpack(PackedWeight(router.inner, width, depth))
    outer = unpack(PackedWeight(router.outer, len(router.outer_bias), width))
    inputs = torch.from_numpy(np.concatenate([embedded, before], axis=1))
    middle = functional.silu(inputs @ inner.T + torch.from_numpy(router.inner_bias))
    return (middle @ outer.T + torch.from_numpy(router.outer_bias)).numpy()


def _range(
    best: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int32],
    rank: Counts,
    drawn: npt.NDArray[np.int32],
) -> tuple[Counts, Counts]:
    """`StandingGuesses.least` and ``most``; an empty range where the token never wins."""
    each = np.arange(len(drawn))
    place = (tokens == drawn[:, None]).argmax(axis=1)
    wins = tokens[each, place] == drawn
    own = best[each, place][:, None]
    # Of equal scores the lower id wins, as everywhere.
    better = (best > own) | ((best == own) & (tokens < drawn[:, None]))
    never = np.iinfo(np.int64).max
    most = np.where(better, rank, never).min(axis=1) - 1
    return rank[each, place], np.where(wins, most, -1)


def _sizes_by_count(rank: Counts, sizes: Counts) -> Counts:
    """[n, K + 1] tokens in the clusters of rank 0 .. k, for every k."""
    held = np.zeros((len(rank), int(rank.max()) + 1), np.int64)
    np.add.at(held, (np.arange(len(rank))[:, None], rank), sizes[None])
    return held.cumsum(axis=1)


def accepted_lengths(
    text: npt.NDArray[np.int32], stands: Sequence[npt.NDArray[np.bool_]]
) -> Counts:
    """Accepted guesses of every draft, drafting over each text from its start to its end.

    ``stands[t]`` [N] says which guesses stand in draft step t; ``text`` [N] is ascending. A draft
    is followed by one more token, and the next draft begins behind it. Drafts that the end of a
    text cuts short are not counted.
    """
    steps = len(stands)
    guess: Any = np.stack(stands, axis=1)
    lengths = []
    for number in np.unique(text):
        first, end = np.searchsorted(text, [number, number + 1])
        at = int(first)
        while at + steps <= end:
            count = 0
            while count < steps and guess[at + count, count]:
                count += 1
            lengths.append(count)
            at += count + 1
    return np.array(lengths, np.int64)
