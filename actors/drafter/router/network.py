"""What the router's network computes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lexshard.kernels.draft.types import Router
from lexshard.kernels.linear import PackedWeight, unpack

Floats = npt.NDArray[np.float32]


def router_scores(router: Router, embedded: Floats, before: Floats) -> Floats:
    """Scores [N, M] of the clusters from embeddings and hidden states before, [N, d] each."""
    width, depth = len(router.inner_bias), 2 * embedded.shape[1]
    inner = unpack(PackedWeight(router.inner, width, depth))
    outer = unpack(PackedWeight(router.outer, len(router.outer_bias), width))
    inputs = torch.from_numpy(np.concatenate([embedded, before], axis=1))
    middle = functional.silu(inputs @ inner.T + torch.from_numpy(router.inner_bias))
    return (middle @ outer.T + torch.from_numpy(router.outer_bias)).numpy()
