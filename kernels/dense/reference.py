"""The dense draw, stated plainly in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.dense.types import Draws
from lexshard.kernels.noise.reference import gumbel_row


def scores(hidden: torch.Tensor, weight: torch.Tensor, draws: Draws) -> npt.NDArray[np.float64]:
    """What the argmax is taken of [N, V]."""
    result: npt.NDArray[np.float64] = (hidden.double() @ weight.double().T).cpu().numpy()
    for row, scale in enumerate(draws.inverse_temperature.tolist()):
        if scale:
            noise = gumbel_row(int(draws.key[row]), int(draws.position[row]), weight.shape[0])
            result[row] = result[row] * scale + noise
    return result


def dense_gumbel(hidden: torch.Tensor, weight: torch.Tensor, draws: Draws) -> npt.NDArray[np.int64]:
    return np.argmax(scores(hidden, weight, draws), axis=1)
