"""What the dense draw takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Draws(NamedTuple):
    """How N rows are drawn: the noise of (key, position), and 1 / temperature (0: greedy)."""

    key: npt.NDArray[np.uint64]  # [N]
    position: npt.NDArray[np.uint64]  # [N]
    inverse_temperature: npt.NDArray[np.float64]  # [N]
