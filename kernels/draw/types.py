"""What a draw takes, as flat arrays that numba kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Controls(NamedTuple):
    """How N rows are sampled, as flat arrays."""

    inverse_temperature: npt.NDArray[np.float64]  # [N] fp32 values; 0 is greedy
    top_k: npt.NDArray[np.int64]  # [N] 0 is off
    top_p: npt.NDArray[np.float64]  # [N] 1 is off
    log_min_p: npt.NDArray[np.float64]  # [N] -inf is off
    key: npt.NDArray[np.uint64]  # [N]
    position: npt.NDArray[np.uint64]  # [N]
