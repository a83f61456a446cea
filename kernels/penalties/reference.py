"""The adjustment, one token at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Adjustments(NamedTuple):
    """The adjustments of N rows as flat arrays; row ``r`` owns ``x[x_offsets[r]:x_offsets[r+1]]``.

    All id arrays are sorted and distinct within a row. ``active`` is False for rows without any
    adjustment. A mask holds a bit per token, a word per block of 64: row ``r`` considers the tokens
    whose bit is set in ``masks[mask[r]]`` alone; ``mask[r]`` is -1 for rows that consider all.

    ``tables[table[r], i]`` is 0 where row ``r`` has never seen token ``i``, otherwise 1 + how often
    ``i`` stands in its output (1: prompt only); ``table[r]`` is -1 for rows without penalties. So
    what a token costs is looked up, however long the history is.
    """

    active: npt.NDArray[np.bool_]  # [N]
    repetition: npt.NDArray[np.float32]  # [N]
    frequency: npt.NDArray[np.float32]  # [N]
    presence: npt.NDArray[np.float32]  # [N]
    tables: npt.NDArray[np.int32]  # [S, W], C-contiguous, W at least the vocabulary size
    table: npt.NDArray[np.int64]  # [N]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]  # like bias_ids
    bias_offsets: npt.NDArray[np.int64]  # [N + 1]
    banned: npt.NDArray[np.int32]
    banned_offsets: npt.NDArray[np.int64]  # [N + 1]
    masks: npt.NDArray[np.uint64]  # [M, B], C-contiguous, B at least the vocabulary's blocks
    mask: npt.NDArray[np.int64]  # [N]


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
        words = a.masks[a.mask[row]].tolist() if a.mask[row] >= 0 else None
        for index in range(offsets[row], offsets[row + 1]):
            token = int(ids[index])
            logit = result[index]
            allowed = words is None or words[token // 64] >> token % 64 & 1
            if token in banned or not allowed:
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
