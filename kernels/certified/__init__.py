"""From hidden states to the tokens that can still be drawn, in one compiled call.

What `kernels.screen`, `kernels.search` and `kernels.rows` do one after the other, for the rows that
nearly all are: an int8 or int4 tier screens them, a threshold decides them, and they want the best
token (of all, or of a nucleus), the best few or those near the best. A step of one row spends more
between such calls than in them. Their results are these calls' own, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels import pool
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.quantize.tiers import Int4Tier, Int8Tier
from lexshard.kernels.search.types import Needs

__all__ = ["Certified", "DenseSlack", "Rows", "certified_candidates"]

# Below this many products other threads cost more than they save.
MULTIPLICATIONS_PER_THREAD = 500_000


class DenseSlack(NamedTuple):
    """What fp32 products with all weights err by, as `Rows` have it."""

    rows: npt.NDArray[np.float32]
    blocks: npt.NDArray[np.float32]
    limits: npt.NDArray[np.float64]


class Rows(NamedTuple):
    """The rows of a vocabulary as kernels take them: a tier to screen with and the weights, with
    the slacks of blocks (`kernels.search.block_slack`)."""

    weight: npt.NDArray[Any]  # [V, d] float32, or uint16 (bfloat16 bits)
    values: npt.NDArray[np.int8]  # [V, D], as in `Int8Tier`, or [V, D / 2], the high nibbles
    scale: npt.NDArray[np.float32]  # [V]
    row_slack: npt.NDArray[np.float32]  # [2, V]
    block_slack: npt.NDArray[np.float32]  # [2, V / 64]
    products: npt.NDArray[np.float32]  # [V] with the common direction, or none
    direction: npt.NDArray[np.float32]  # [d] or none
    limits: npt.NDArray[np.float64]  # [2] the norm of integer hidden states, the largest size
    # As in `Int4Tier`; none of an int8 tier.
    multipliers: npt.NDArray[np.uint8]  # [V, D / 32]
    low: npt.NDArray[np.uint8]  # [V, D / 2]
    fine_row_slack: npt.NDArray[np.float32]  # [2, V]
    # For fp32 products with all weights, as in `PackedWeight`; none where these are not packed.
    panels: npt.NDArray[Any]  # [P, d, 16]
    dense_row_slack: npt.NDArray[np.float32]  # [2, V]
    dense_block_slack: npt.NDArray[np.float32]  # [2, V / 64]
    dense_limits: npt.NDArray[np.float64]  # [2] an error per unit of norms, the largest row's norm

    @classmethod
    def of(
        cls,
        weight: npt.NDArray[Any],
        tier: Int8Tier | Int4Tier,
        block_slack: npt.NDArray[np.float32],
        panels: npt.NDArray[Any] | None,
        dense: DenseSlack,
    ) -> Rows:
        """Those of ``weight`` [V, d], its tier, and what products with all of it err by."""
        none, common = np.empty(0, np.float32), tier.common
        if isinstance(tier, Int4Tier):
            values = tier.high.view(np.int8)
            planes = (tier.multipliers, tier.low, tier.fine_row_slack)
        else:
            values, no_plane = tier.values, np.empty((0, 0), np.uint8)
            planes = (no_plane, no_plane, np.empty((2, 0), np.float32))
        return cls(
            weight,
            values,
            tier.scale,
            tier.row_slack,
            block_slack,
            none if common is None else common.products,
            none if common is None else common.vector,
            np.array([tier.hidden_limit, tier.largest_size]),
            *planes,
            np.empty((0, 0, 0), weight.dtype) if panels is None else panels,
            *dense,
        )


class Certified(NamedTuple):
    """The candidates of N rows, sorted by id within a row, and what certificates tell of them."""

    ids: npt.NDArray[np.int32]  # [total]
    raw: npt.NDArray[np.float32]  # [total] canonical logits before any processor
    offsets: npt.NDArray[np.int64]  # [N + 1]
    thresholds: npt.NDArray[np.float64]  # [N] what the answers certainly reach
    largest: npt.NDArray[np.float64]  # [N] no token's upper bound is larger
    best: npt.NDArray[np.float64]  # [N] the best adjusted logit that is known
    leaders: int  # tokens whose logits set the thresholds
    members: npt.NDArray[np.bool_]  # [N] whether what is drawn is certainly of the nucleus, if any
    weighed: npt.NDArray[np.int64]  # [N] more canonical logits that that took
    again: npt.NDArray[np.bool_]  # [N] whether it took products with all weights, too
    refined: npt.NDArray[np.int64]  # [N] tokens whose estimates both planes of nibbles bettered


def certified_candidates(
    hidden: npt.NDArray[np.float32],
    rows: Rows,
    needs: Needs,
    adjustments: Adjustments,
    top_p: npt.NDArray[np.float64],
) -> Certified | None:
    """Every token whose upper bound reaches its row's threshold. ``hidden`` [N, d], C-contiguous.
    Of GUMBEL rows whose ``top_p`` [N] is below 1, whether what they draw from their candidates is
    what they draw from their nucleus (`kernels.certified.nucleus`).

    None where hidden states are not finite, or too large for estimates to mean anything.
    """
    from lexshard.kernels.certified import cpu  # numba compiles on first use

    large = len(hidden) * rows.values.size > MULTIPLICATIONS_PER_THREAD
    team, size = pool.team(worth=large)
    known, found = cpu.certified_candidates(team, size, hidden, *rows, needs, adjustments, top_p)
    return Certified(*found) if known else None
