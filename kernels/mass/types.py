"""What is known of the mass outside a list."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class OutsideMass(NamedTuple):
    """What the tokens outside a list can amount to, per row."""

    log_upper: npt.NDArray[np.float64]  # [N] log-sum-exp of upper bounds times s, rounded up
    log_lower: npt.NDArray[np.float64]  # [N] of lower bounds, rounded down
    largest: npt.NDArray[np.float64]  # [N] the largest upper bound, not scaled by s
