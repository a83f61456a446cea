"""What the router should answer: how likely the draft's next token is in each cluster."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from actors.body.head_weights import HeadWeights

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
    weight = head.weight.float().T.contiguous()
    clusters = int(cluster_of.max()) + 1
    member = torch.zeros(len(cluster_of), clusters)
    member[torch.arange(len(cluster_of)), torch.from_numpy(cluster_of).long()] = 1.0
    shares = np.empty((len(hidden), clusters), np.float16)
    for first in range(0, len(hidden), ROWS):
        logits = torch.from_numpy(hidden[first : first + ROWS]) @ weight
        some = torch.softmax(logits / temperature, dim=1) @ member
        shares[first : first + ROWS] = some.half().numpy()
        progress(len(some) / len(hidden))
    return shares
