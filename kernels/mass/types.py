"""What is known of the mass outside a list, and where the tokens of a row lie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class OutsideMass(NamedTuple):
    """What the tokens outside a list can amount to, per row."""

    log_upper: npt.NDArray[np.float64]  # [N] log-sum-exp of upper bounds times s, rounded up
    log_lower: npt.NDArray[np.float64]  # [N] of lower bounds, rounded down
    largest: npt.NDArray[np.float64]  # [N] the largest upper bound, not scaled by s


class Outline(NamedTuple):
    """Where the tokens of one row lie, by their estimates, in bins of tempered logit.

    Bin ``b`` holds estimates with ``floor(estimate * s / BIN_WIDTH) == b`` whoever counts them, so
    that outlines of disjoint sets of tokens add up. Excluded tokens and those ``BINS`` or more
    below the best one are left out.
    """

    top: int  # number of the first bin, that of the best estimate
    counts: npt.NDArray[np.int32]  # [B] tokens per bin, from ``top`` downwards
    errors: npt.NDArray[np.float32]  # [B] their slack times s, summed
    widest: float  # the largest slack among them, in bins

    def count_from(self, lowest: int) -> int:
        """How many tokens lie in bin ``lowest`` or above."""
        return int(self.counts[: max(self.top - lowest + 1, 0)].sum())
