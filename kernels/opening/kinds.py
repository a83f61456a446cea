"""What an opening is for, and how it ended, as numbers that numba kernels compare."""

GREEDY = 0
GUMBEL = 1
TOP_K = 2
MIN_P = 3
EPSILON = 4
NUCLEUS = 5

CERTIFIED = 0
SPENT = 1
EXAMINE = 2
