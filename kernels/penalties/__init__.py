"""Processors of a row before temperature: allowed and banned ids, bias, the three penalties.

Every processor is a monotone map of one token's logit, rounded to fp32 after each operation. So
the same function, applied to bounds of a logit, gives bounds of the adjusted logit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.penalties import cpu, reference

Implementation = Literal["reference", "cpu"]

__all__ = ["Adjustments", "adjust", "select_row", "select_rows"]


class Adjustments(NamedTuple):
    """The adjustments of N rows as flat arrays; row ``r`` owns ``x[x_offsets[r]:x_offsets[r+1]]``.

    All id arrays are sorted and distinct within a row. ``active`` is False for rows without any
    adjustment; ``restricted`` is True for rows that consider ``allowed`` ids only.

    ``tables[table[r], i]`` is 0 where row ``r`` has never seen token ``i``, otherwise 1 + how often
    ``i`` stands in its output (1: prompt only); ``table[r]`` is -1 for rows without penalties. So
    what a token costs is looked up, however long the history is.
    """

    active: npt.NDArray[np.bool_]  # [N]
    repetition: npt.NDArray[np.float32]  # [N]
    frequency: npt.NDArray[np.float32]  # [N]
    presence: npt.NDArray[np.float32]  # [N]
    tables: npt.NDArray[np.int32]  # [S, W], C-contiguous, W at least the vocabulary size
    table: npt.NDArray[np.int64]  # [N]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]  # like bias_ids
    bias_offsets: npt.NDArray[np.int64]  # [N + 1]
    banned: npt.NDArray[np.int32]
    banned_offsets: npt.NDArray[np.int64]  # [N + 1]
    allowed: npt.NDArray[np.int32]
    allowed_offsets: npt.NDArray[np.int64]  # [N + 1]
    restricted: npt.NDArray[np.bool_]  # [N]


def adjust(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    adjustments: Adjustments,
    *,
    implementation: Implementation | None = None,
) -> npt.NDArray[np.float32]:
    """Adjusted logits [total] of ragged candidates: row ``r`` owns ``offsets[r]:offsets[r + 1]``.

    ``ids`` [total] are sorted within a row, ``logits`` [total] raw fp32. In fp32 and in this
    order: ``-inf`` where ``allowed`` is given and lacks the id or ``banned`` has it; ``l + bias``;
    for seen ids ``l / repetition`` if ``l > 0`` else ``l * repetition``; for ids in the output
    ``l - frequency * count``, then ``l - presence``.
    """
    module = reference if implementation == "reference" else cpu
    return module.adjust(ids, logits, offsets, adjustments)


def select_rows(adjustments: Adjustments, first: int, last: int) -> Adjustments:
    """The adjustments of rows ``first`` to ``last - 1`` alone."""
    per_row = {"active", "repetition", "frequency", "presence", "table", "restricted"}
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
