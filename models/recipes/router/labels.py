"""What the router should answer: how likely the draft's next token is in each cluster."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.head_weights import HeadWeights

ROWS = 512  # positions at a time


def cluster_shares(
    head: HeadWeights,
    hidden: npt.NDArray[np.float32],
    cluster_of: npt.NDArray[np.integer],
    temperature: float,
    progress: Callable[[float], None] = lambda share: None,
) -> npt.NDArray[np.float16]:
    """Probability [N, M] that the draft's next token is in each cluster.

    ``hidden`` [N, d] are the head's inputs; the softmax is taken at ``temperature``.
    """
    order = np.argsort(cluster_of, kind="stable")  # a cluster's tokens side by side
    sizes = np.bincount(cluster_of)
    begins = np.cumsum(sizes) - sizes
    weight = head.weight[torch.from_numpy(order)].float().T.contiguous()
    shares = np.empty((len(hidden), len(sizes)), np.float16)
    for first in range(0, len(hidden), ROWS):
        logits = torch.from_numpy(hidden[first : first + ROWS]) @ weight
        softmax = torch.softmax(logits / temperature, dim=1).numpy()
        shares[first : first + ROWS] = np.add.reduceat(softmax, begins, axis=1)
        progress(len(softmax) / len(hidden))
    return shares
