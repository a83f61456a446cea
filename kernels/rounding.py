"""What arithmetic in fp32 can lose, and the margins that bounds of logits keep because of it.

A bound is computed in the precision of what it bounds, so it is widened by more than its own
roundings. The margins are far above those and far below what would make another token a candidate.
"""

from __future__ import annotations

import numpy as np

# Half the distance from 1 to the next fp32 number: the relative error of one rounding.
UNIT_ROUNDOFF = 2.0**-24
# Of fp32 sums of products that stay below the first nothing overflows on the way; what underflows
# loses less than the second.
LARGEST_BOUND, SMALLEST_PRODUCT = 1e37, 1e-38
# The step between the smallest fp32 numbers: half of it is what a rounding among them can lose.
SMALLEST_STEP = 2.0**-149
# Of the factors of a slack: the seven roundings of the sum (`kernels.search.reference.outward`).
INFLATION = 1.0 + 1e-6
# Of a value: the rounding of the final addition of its slack.
ULP_SHARE = np.float32(2.0**-22)
# Above every underflow of a slack.
SMALLEST_SLACK = 2.0**-120
# Above the rounding of any fp32 noise (at most 43), whatever computes its logarithms; below
# anything that would open more blocks.
NOISE_ROUNDING = 1e-5
