"""What the adjustment of rows takes, as flat arrays that numba kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Adjustments(NamedTuple):
    """The adjustments of N rows as flat arrays; row ``r`` owns ``x[x_offsets[r]:x_offsets[r+1]]``.

    All id arrays are sorted and distinct within a row. ``active`` is False for rows without any
    adjustment; ``restricted`` is True for rows that consider ``allowed`` ids only.

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
    allowed: npt.NDArray[np.int32]
    allowed_offsets: npt.NDArray[np.int64]  # [N + 1]
    restricted: npt.NDArray[np.bool_]  # [N]
