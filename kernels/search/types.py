"""What the search takes and what it finds, as flat arrays that numba kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The kinds of search, as numbers that numba kernels compare.
GREEDY, GUMBEL, TOP_K, MIN_P = 0, 1, 2, 3

# The token ids of rows that are numbered like them.
EVERY_TOKEN = np.empty(0, np.int32)

Ragged = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]


class Needs(NamedTuple):
    """What N rows ask of the search, as flat arrays.

    GREEDY and GUMBEL want the best token, TOP_K the ``k`` best, MIN_P those within ``ln min_p``
    of the best. With ``s`` the inverse temperature and ``g_i`` the noise of (key, position),
    GUMBEL compares ``l_i s + g_i`` and MIN_P ``l_i s``; the others compare ``l_i``.
    """

    kind: npt.NDArray[np.int64]  # [N] GREEDY, GUMBEL, TOP_K or MIN_P
    k: npt.NDArray[np.int64]  # [N]
    log_min_p: npt.NDArray[np.float64]  # [N]
    key: npt.NDArray[np.uint64]  # [N]
    position: npt.NDArray[np.uint64]  # [N]
    inverse_temperature: npt.NDArray[np.float64]  # [N], fp32 values, above 0 unless GREEDY


class Estimates(NamedTuple):
    """Approximate raw logits and their errors:

    ``|values_ni - canonical_ni| <= hidden_slack_n0 row_slack_0i + hidden_slack_n1 row_slack_1i +
    hidden_slack_n2``. No slack is negative; all are finite in fp32, and so are the values.

    The search numbers rows from 0; ids and adjustments are of these numbers. Row ``i`` is token
    ``token_ids[i]`` of the vocabulary, by whose id its noise is drawn, and token ``i`` where
    ``token_ids`` is empty. ``by_block`` says that every 64 rows are a block of the vocabulary, in
    order of id (the last one may end early): their noise then has one bound. Otherwise it is drawn
    row by row, which costs a hundred times as much.
    """

    values: npt.NDArray[np.float32]  # [N, W], W >= vocabulary size; [total] for `narrow`
    row_slack: npt.NDArray[np.float32]  # [2, V]
    hidden_slack: npt.NDArray[np.float64]  # [N, 3]
    block_slack: npt.NDArray[np.float32]  # [2, V / 64], see `block_slack`
    token_ids: npt.NDArray[np.int32] = EVERY_TOKEN  # [V] ascending, or none
    by_block: bool = True


class Leaders(NamedTuple):
    """The best tokens of N rows by estimate, and what the same pass tells `find_candidates`."""

    ids: npt.NDArray[np.int32]  # [total], sorted within a row
    offsets: npt.NDArray[np.int64]  # [N + 1]
    maxima: npt.NDArray[np.float32]  # [N, V / 64] of the raw estimates that the mask holds
    noise: npt.NDArray[np.float64]  # [N, V / 64] bounds on the noise of GUMBEL rows


class Found(NamedTuple):
    """The candidates of N rows, sorted by id within a row."""

    ids: npt.NDArray[np.int32]  # [total]
    offsets: npt.NDArray[np.int64]  # [N + 1]
    largest: npt.NDArray[np.float64]  # [N] no token's upper bound is larger
