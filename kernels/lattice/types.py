"""What sparsification leaves of a distribution, and what quantisation makes of that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Kept(NamedTuple):
    """The tokens that are kept of a distribution, renormalised, and the mass that is not."""

    ids: npt.NDArray[np.int32]  # [K] in order
    probabilities: npt.NDArray[np.float64]  # [K] their sum is 1
    dropped: float


class Lattice(NamedTuple):
    """The distribution ``counts / sum(counts)`` over ``ids``."""

    ids: npt.NDArray[np.int32]  # [K] in order, distinct
    counts: npt.NDArray[np.int64]  # [K] not negative, some above 0
