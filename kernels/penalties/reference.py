"""The adjustment, one token at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.penalties.types import Adjustments


def adjust(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    adjustments: Adjustments,
) -> npt.NDArray[np.float32]:
    a = adjustments
    result = logits.copy()
    for row in range(len(offsets) - 1):
        if not a.active[row]:
            continue
        bias = slice(a.bias_offsets[row], a.bias_offsets[row + 1])
        biases = dict(zip(a.bias_ids[bias].tolist(), a.bias_values[bias], strict=True))
        banned = set(a.banned[a.banned_offsets[row] : a.banned_offsets[row + 1]].tolist())
        allowed = set(a.allowed[a.allowed_offsets[row] : a.allowed_offsets[row + 1]].tolist())
        for index in range(offsets[row], offsets[row + 1]):
            token = int(ids[index])
            logit = result[index]
            if token in banned or (a.restricted[row] and token not in allowed):
                result[index] = -np.inf
                continue
            if token in biases:
                logit = logit + biases[token]
            entry = int(a.tables[a.table[row], token]) if a.table[row] >= 0 else 0
            if entry > 0:
                repetition = a.repetition[row]
                logit = logit / repetition if logit > 0 else logit * repetition
                if entry > 1:
                    logit = logit - a.frequency[row] * np.float32(entry - 1)
                    logit = logit - a.presence[row]
            result[index] = logit
    return result
