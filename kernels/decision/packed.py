"""Candidates of rows without bias, bans and masks, which are nearly all rows.

What a call costs before it computes grows with the number of arrays it is given. So what such rows
need is packed into a few, once for many steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.draw import Controls
from lexshard.kernels.draw.cpu import draw_row
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.penalties.cpu import penalise


class PackedRows(NamedTuple):
    """Controls and penalties of N rows, see `kernels.draw.Controls` and
    `kernels.penalties.Adjustments`."""

    penalties: npt.NDArray[np.float32]  # [3, N] repetition, frequency, presence
    limits: npt.NDArray[np.float64]  # [3, N] inverse temperature, top-p, log min-p
    counts: npt.NDArray[np.int64]  # [2, N] top-k, row of tables or -1
    noise: npt.NDArray[np.uint64]  # [2, N] key, position
    tables: npt.NDArray[np.int32]  # [S, W]

    @property
    def position(self) -> npt.NDArray[np.uint64]:
        """Of every row [N]; writable."""
        return self.noise[1]


def pack(controls: Controls, adjustments: Adjustments) -> PackedRows | None:
    """The rows packed, None where one of them has a bias, a ban or a mask."""
    a = adjustments
    if (a.mask >= 0).any() or len(a.bias_ids) or len(a.banned):
        return None
    return PackedRows(
        np.stack([a.repetition, a.frequency, a.presence]),
        np.stack([controls.inverse_temperature, controls.top_p, controls.log_min_p]),
        np.stack([controls.top_k, a.table]),
        np.stack([controls.key, controls.position]),
        a.tables,
    )


@njit(nogil=True, cache=True)
def decide_packed_rows(ids, raw, offsets, penalties, limits, counts, noise, tables):  # type: ignore[no-untyped-def]
    controls = Controls(limits[0], counts[0], limits[1], limits[2], noise[0], noise[1])
    rows = offsets.size - 1
    tokens = np.empty(rows, np.int64)
    logits = raw.copy()
    for row in range(rows):
        start, stop = offsets[row], offsets[row + 1]
        if counts[1, row] >= 0:
            table = tables[counts[1, row]]
            repetition, frequency = penalties[0, row], penalties[1, row]
            presence = penalties[2, row]
            for index in range(start, stop):
                entry = table[ids[index]]
                if entry > 0:
                    logits[index] = penalise(
                        logits[index], repetition, frequency, presence, entry - 1
                    )
        tokens[row] = draw_row(ids[start:stop], logits[start:stop], controls, row)
    return tokens


def decide_packed(
    ids: npt.NDArray[np.int32],
    raw: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    rows: PackedRows,
) -> npt.NDArray[np.int64]:
    """The tokens [N] of `kernels.decision.decide_candidates` for the rows that were packed."""
    return decide_packed_rows(ids, raw, offsets, *rows)
