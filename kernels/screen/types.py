"""Hidden states as integers, what that and all later roundings can cost, and what a screen gives.

With a common direction ``m`` a hidden state is ``h = share m + r``; without one ``r = h``. Then
``r``, for a 1-bit tier turned by its rotation, is ``step values`` plus a loss. The step is as fine
as 16 bits (12 bits for a 1-bit tier, whose tables hold sums of four; 8 bits where int8 products are
worth more than a fine step) and the tier allow: sums of integer products must stay inside 32 bits,
so ``||values||`` stays below ``tier.hidden_limit``.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.quantize.tiers import DitheredInt4Tier, Int8Tier, OneBitTier, Tier
from lexshard.kernels.rounding import UNIT_ROUNDOFF

HiddenBits = Literal[8, 16]

# Fewer tokens than this per row are rescored at once rather than refined first.
WORTH_REFINING = 64

LARGEST_INTEGER = 32767
LARGEST_EIGHT_BITS = 127
LARGEST_ROTATED = 2047  # a sum of four, and 8,192 more, is in two 7-bit halves
# One rounding to fp32, and every float64 rounding besides.
ROUNDING = UNIT_ROUNDOFF * 1.01
# The float64 roundings of a norm.
NORM_MARGIN = 1.0 + 1e-9
# Of the smallest step: sums of its integers stay inside 32 bits whatever the norm was rounded to.
STEP_MARGIN = 1.0 + 1e-6
# Above every underflow of a loss.
SMALLEST_LOSS = 2.0**-88
# What float64 roundings of the product with a centre may cost, per unit of its vectors.
CENTRE_ROUNDING = 1e-12
# Beyond this fp32 may overflow somewhere: no estimate, an infinite bound.
LARGEST_PRODUCT = 1e37


class QuantizedHidden(NamedTuple):
    """N hidden states for the kernels of one tier."""

    values: npt.NDArray[Any]  # [N, D] int16, int8 for 8 `HiddenBits`, in the tier's order
    starts: npt.NDArray[np.int32]  # [N, D / 16], see `dot_nibbles`; [N, 0] without nibbles
    step: npt.NDArray[np.float64]  # [N]
    share: npt.NDArray[np.float64]  # [N] how much of the common direction
    offset: npt.NDArray[np.float64]  # [N] the product with the centre of a 1-bit tier
    hidden_slack: npt.NDArray[np.float64]  # [N, 2] meets `row_slack` [2, V]


class Screened(NamedTuple):
    """Estimates and their bounds; tensors on the device of the tier, on the CPU numpy arrays.

    ``|estimate_ni - canonical_ni| <= sum_k hidden_slack_nk row_slack_ki``, where ``canonical`` is
    the raw canonical logit. Both slacks are positive or zero. An infinite entry in a row of
    ``hidden_slack`` says that its estimates mean nothing (they are finite all the same).
    """

    estimate: Any  # [N, V] fp32
    row_slack: Any  # [2, V] fp32: error norm, size
    hidden_slack: Any  # [N, 2] float64: ||r|| (see `OneBitTier` for its own), roundings per size


def largest_integer(tier: Tier, bits: HiddenBits = 16) -> int:
    """The largest integer a hidden state of this tier may hold.

    Raises ValueError for 8 bits and a tier that does not multiply bytes.
    """
    if bits == 8:
        if not isinstance(tier, Int8Tier):
            raise ValueError("only int8 tiers multiply 8-bit hidden states; leave hidden_bits out")
        return LARGEST_EIGHT_BITS
    return LARGEST_ROTATED if isinstance(tier, OneBitTier) else LARGEST_INTEGER


def padded_columns(tier: Tier) -> int:
    """The stored width D of a tier."""
    if isinstance(tier, Int8Tier):
        return tier.values.shape[1]
    if isinstance(tier, OneBitTier):
        return 8 * tier.signs.shape[1]
    return 2 * (tier.nibbles if isinstance(tier, DitheredInt4Tier) else tier.high).shape[1]
