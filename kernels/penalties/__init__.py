"""Processors of a row before temperature: masks, banned ids, bias, the three penalties.

Every processor is a monotone map of one token's logit, rounded to fp32 after each operation. So
the same function, applied to bounds of a logit, gives bounds of the adjusted logit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.penalties import cpu
from lexshard.kernels.penalties.reference import Adjustments

__all__ = ["Adjustments", "adjust", "select_row", "select_rows"]


def adjust(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    adjustments: Adjustments,
) -> npt.NDArray[np.float32]:
    """Adjusted logits [total] of ragged candidates: row ``r`` owns ``offsets[r]:offsets[r + 1]``.

    ``ids`` [total] are sorted within a row, ``logits`` [total] raw fp32. In fp32 and in this
    order: ``-inf`` where the row's mask lacks the id or ``banned`` has it; ``l + bias``;
    for seen ids ``l / repetition`` if ``l > 0`` else ``l * repetition``; for ids in the output
    ``l - frequency * count``, then ``l - presence``.
    """
    return cpu.adjust(ids, logits, offsets, adjustments)


def select_rows(adjustments: Adjustments, first: int, last: int) -> Adjustments:
    """The adjustments of rows ``first`` to ``last - 1`` alone."""
    per_row = {"active", "repetition", "frequency", "presence", "table", "mask"}
    return Adjustments(
        *(
            field[first : last + 1]
            if name.endswith("_offsets")
            else field[first:last]
            if name in per_row
            else field
            for name, field in adjustments._asdict().items()
        )
    )


def select_row(adjustments: Adjustments, row: int) -> Adjustments:
    """The adjustments of one row alone."""
    return select_rows(adjustments, row, row + 1)
