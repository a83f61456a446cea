"""The canonical logit, stated plainly in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LANES = 16


def canonical_logits(
    hidden: npt.NDArray[np.float32],
    weight: npt.NDArray[Any],
    ids: npt.NDArray[np.int32] | None = None,
    offsets: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float32]:
    if weight.dtype == np.uint16:
        weight = (weight.astype(np.uint32) << 16).view(np.float32)
    if ids is None or offsets is None:
        return np.stack([_one(row, weight) for row in hidden])
    return np.concatenate(
        [_one(row, weight[ids[offsets[r] : offsets[r + 1]]]) for r, row in enumerate(hidden)]
    )


def _one(hidden: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    columns = weight.shape[1]
    padding = -columns % LANES
    products = weight.astype(np.float64) * hidden.astype(np.float64)
    products = np.pad(products, ((0, 0), (0, padding)))
    products = products.reshape(len(weight), products.shape[1] // LANES, LANES)
    lanes = np.zeros((len(weight), LANES))  # [V, 16]
    for step in range(products.shape[1]):
        lanes += products[:, step]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    with np.errstate(over="ignore"):
        return lanes[:, 0].astype(np.float32)
