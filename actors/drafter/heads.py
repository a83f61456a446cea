"""Which output rows a draft model looks at: all, a static list, or what a router picks.

A guess costs what its head reads, and a head that misses the target's token costs the rest of the
draft. Which head is used changes how many guesses stand, never the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.drafter.router.file import RouterFile
from lexshard.kernels.draft.types import DraftHead, Router
from lexshard.kernels.linear import fits_bfloat16, pack
from lexshard.kernels.linear.tile import PANEL

FILLER = -1  # the id of a row that only fills a panel up

Ids = npt.NDArray[np.int32]


def full_head(weights: torch.Tensor, vocabulary_size: int | None = None) -> DraftHead:
    """Every row of the output matrix ``weights [V, d]``, float32 or bfloat16.

    ``vocabulary_size`` is the tokenizer's, None all of V: rows beyond it are in no head.
    """
    size = weights.shape[0] if vocabulary_size is None else vocabulary_size
    return _packed(weights, [np.arange(size, dtype=np.int32)])


def frequency_head(
    weights: torch.Tensor, ids: npt.ArrayLike, vocabulary_size: int | None = None
) -> DraftHead:
    """The rows ``ids`` of ``weights [V, d]``, whatever the context (FR-Spec's static list).

    Raises ValueError for ids that are missing, repeated or not below ``vocabulary_size``.
    """
    size = weights.shape[0] if vocabulary_size is None else vocabulary_size
    chosen = np.sort(np.asarray(ids, np.int64))
    if not chosen.size:
        raise ValueError("a static list needs at least one token")
    if chosen[0] < 0 or chosen[-1] >= size:
        raise ValueError(f"ids of a static list must lie in 0 .. {size - 1}")
    if (np.diff(chosen) == 0).any():
        raise ValueError("a token is named twice in the static list")
    return _packed(weights, [chosen.astype(np.int32)])


def routed_head(weights: torch.Tensor, file: RouterFile) -> DraftHead:
    """The clusters that a trained router picks in a context, and its hot tokens always.

    ``weights [V, d]`` are those the router was made for (`read_router_file` checks that); rows
    beyond the tokenizer's vocabulary, which the file does not name, are left out.
    """
    members = clusters_of(file.cluster_of)
    router = Router(
        inner=pack(torch.from_numpy(file.inner), half=False).panels,
        inner_bias=file.inner_bias,
        outer=pack(torch.from_numpy(file.outer), half=False).panels,
        outer_bias=file.outer_bias,
        budgets=file.budgets,
    )
    return _packed(weights, members, always=file.always, router=router)


def clusters_of(cluster_of: npt.NDArray[np.integer]) -> list[Ids]:
    """The token ids of every cluster, ascending, from the cluster of every token [V]."""
    order = np.argsort(cluster_of, kind="stable").astype(np.int32)
    return np.split(order, np.cumsum(np.bincount(cluster_of))[:-1])


def _packed(
    weights: torch.Tensor,
    clusters: Sequence[Ids],
    *,
    always: Ids | None = None,
    router: Router | None = None,
) -> DraftHead:
    panels = [-(-len(members) // PANEL) for members in clusters]
    offsets = np.concatenate([[0], np.cumsum(panels)]).astype(np.int32)
    ids = np.full(int(offsets[-1]) * PANEL, FILLER, np.int32)
    for first, members in zip(offsets, clusters, strict=False):
        ids[first * PANEL : first * PANEL + len(members)] = members
    held = weights.detach().cpu()
    rows = held[torch.from_numpy(np.maximum(ids, 0))].float()
    rows[torch.from_numpy(ids == FILLER)] = 0.0
    return DraftHead(
        panels=pack(rows, half=fits_bfloat16(held.float())).panels,
        ids=ids,
        offsets=offsets,
        always=np.zeros(0, np.int32) if always is None else always,
        router=router,
    )
