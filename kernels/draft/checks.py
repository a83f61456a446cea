"""What drafting must not be given: native code reads where it is told to."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numba import njit

from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.draft.types import DraftHead
from lexshard.kernels.linear.tile import PANEL


def check_head(head: DraftHead, width: int, vocabulary_size: int) -> None:
    """Raise ValueError unless ``head`` is one of ``vocabulary_size`` tokens for hidden states of
    ``width``. Done once, when a head is built."""
    panels, offsets = len(head.panels), head.offsets
    if head.panels.shape[1:] != (width, PANEL) or head.ids.shape != (panels * PANEL,):
        raise ValueError(
            f"panels {head.panels.shape} with {head.ids.size} ids are no rows of width {width}"
        )
    if offsets[0] != 0 or offsets[-1] != panels or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets of the clusters do not cut {panels} panels into pieces")
    tokens = head.ids[head.ids >= 0]
    if not tokens.size or tokens.max() >= vocabulary_size or len(np.unique(tokens)) != tokens.size:
        raise ValueError(
            f"the ids of a draft head are different tokens below {vocabulary_size}, at least one"
        )
    for first, last in pairwise(offsets):
        own = head.ids[first * PANEL : last * PANEL]
        own = own[: np.count_nonzero(own >= 0)]
        if (own < 0).any() or (np.diff(own) <= 0).any():
            raise ValueError("the ids of a cluster ascend, and rows without a token come last")
    _check_router(head, width)


def _check_router(head: DraftHead, width: int) -> None:
    clusters = len(head.offsets) - 1
    if head.always.size and not 0 <= head.always.min() <= head.always.max() < clusters:
        raise ValueError(f"a cluster of {head.always.tolist()} is none of {clusters}")
    router = head.router
    if router is None:
        return
    inner = router.inner_bias.size
    if (
        router.inner.shape != (inner // PANEL, 2 * width, PANEL)
        or inner % PANEL
        or router.outer.shape != (-(-clusters // PANEL), inner, PANEL)
        or router.outer_bias.shape != (clusters,)
    ):
        raise ValueError(
            f"a router {router.inner.shape}, {router.outer.shape} does not choose among "
            f"{clusters} clusters by an embedding and a hidden state of {width}"
        )
    if not router.budgets.size or router.budgets.min() < 0:
        raise ValueError("a router's budgets are numbers of clusters, one step at least")


# What `pending_fault` finds.
FAULTS = (
    "every sequence has at least one pending token",
    "a pending token has no embedding",
    "numbers of guesses and positions are not negative",
    "the tokens and guesses of a sequence do not fit its block table or the model's positions",
    "a block is none of the cache's",
)


@njit(nogil=True, cache=True)
def pending_fault(  # type: ignore[no-untyped-def]
    tokens, offsets, start, block_tables, most, embeddings, positions, blocks
):
    """The place in FAULTS of what is wrong with pending tokens, -1 where nothing is.

    ``embeddings``, ``positions`` and ``blocks`` are how many of them there are. In the same native
    call as the drafting: a dozen numpy reductions would take as long as a guess.
    """
    if start.size == 0 or offsets[0] != 0 or offsets[start.size] != tokens.size:
        return 0
    for sequence in range(start.size):
        count = offsets[sequence + 1] - offsets[sequence]
        if count < 1:
            return 0
        if start[sequence] < 0 or most[sequence] < 0:
            return 2
        # Positions that are written: all pending tokens, and all guesses but the last.
        needed = start[sequence] + count + max(most[sequence], 1) - 1
        if needed > min(block_tables.shape[1] * BLOCK_SIZE, positions):
            return 3
        for index in range((needed + BLOCK_SIZE - 1) // BLOCK_SIZE):
            if not 0 <= block_tables[sequence, index] < blocks:
                return 4
    for token in tokens:
        if not 0 <= token < embeddings:
            return 1
    return -1
