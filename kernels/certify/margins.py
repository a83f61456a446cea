"""What float64 roundings of a log-sum-exp can amount to, and of the integer masses of top-p."""

from __future__ import annotations

# One exponential and the rounding of its argument, which is at most 750 from the largest.
TERM_ROUNDING = 2e-13
# The rounding of a sum, per term added.
SUM_ROUNDING = 2.0**-52
# The rounding of what exponentials are taken relative to, and of the last addition.
LOG_ROUNDING = 2.0**-50
# Integer masses against real ones: an exponential and the rounding of its argument, relative.
MASS_ROUNDING = 1e-12
# An integer mass is rounded by at most this, in its own unit.
HALF_A_UNIT = 0.5
# With more than e**13 times the mass of the best token outside, no set is certified (and integer
# masses would not fit 63 bits).
LARGEST_RATIO = 13.0
# `kernels.truncate` holds for vocabularies below this.
LARGEST_VOCABULARY = 1 << 20
