"""The dense draw on the CPU: one matrix product, a row of noise, an argmax."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.dense.types import Draws
from lexshard.kernels.noise.cpu import gumbel_row


def dense_gumbel(hidden: torch.Tensor, weight: torch.Tensor, draws: Draws) -> npt.NDArray[np.int64]:
    logits = torch.nn.functional.linear(hidden.float(), weight.float()).numpy()
    tokens = np.empty(len(logits), np.int64)
    for row, scale in enumerate(draws.inverse_temperature.tolist()):
        scores = logits[row]
        if scale:
            noise = gumbel_row(int(draws.key[row]), int(draws.position[row]), len(scores))
            scores = scores.astype(np.float64) * scale + noise
        tokens[row] = np.argmax(scores)
    return tokens
