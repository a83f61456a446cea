"""Sums over several ranks in plain numpy, obviously in the one order that there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.parallel import LEAVES

Array = npt.NDArray[Any]


def tree_sum(parts: Sequence[Array]) -> Array:
    """The float32 sum of ``parts``, a power of two of them: neighbours first, then pairs."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return np.asarray(tree_sum(parts[:half]) + tree_sum(parts[half:]))


def product(x: Array, weight: Array) -> Array:
    """``x [T, K] @ weight [N, K].T`` as the tree of float32 leaves, each a sum in float64 that is
    rounded once: ``[T, N]``."""
    columns = np.split(np.arange(x.shape[1]), LEAVES)
    wide, weights = x.astype(np.float64), weight.astype(np.float64)
    leaves = [(wide[:, own] @ weights[:, own].T).astype(np.float32) for own in columns]
    return tree_sum(leaves)
