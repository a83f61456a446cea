"""The kinds of search, as numbers that numba kernels compare."""

GREEDY = 0
GUMBEL = 1
TOP_K = 2
MIN_P = 3
