"""What a head finds and the decision plane decides from: the tokens that can still win."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import Certificate
from lexshard.kernels.penalties import Adjustments, adjust


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Per row, the tokens that can still win, with raw canonical logits (before any processor).

    Ragged: row ``r`` owns ``ids[offsets[r]:offsets[r + 1]]``, sorted by id. ``adjustments`` are the
    processors of each row; samplers run them, from states of their own.
    """

    ids: npt.NDArray[np.int32]  # [total]
    raw: npt.NDArray[np.float32]  # [total]
    offsets: npt.NDArray[np.int64]  # [N + 1]
    certificates: tuple[Certificate, ...]
    adjustments: Adjustments | None = None  # N rows
    drawn: npt.NDArray[np.int32] | None = None  # [N] by the head's device, -1 where it drew none

    def some(self, rows: Sequence[int], adjustments: Adjustments | None) -> Candidates:
        """Those of ``rows``, in this order, whose processors are ``adjustments``."""
        own = [slice(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return Candidates(
            np.concatenate([self.ids[each] for each in own]),
            np.concatenate([self.raw[each] for each in own]),
            np.cumsum([0, *(each.stop - each.start for each in own)], dtype=np.int64),
            tuple(self.certificates[row] for row in rows),
            adjustments,
            None if self.drawn is None else self.drawn[list(rows)],
        )

    def with_rows(self, rows: Sequence[int], those: Candidates) -> Candidates:
        """These, but of ``rows`` what ``those`` are, in this order."""
        parts = [(self, row) for row in range(len(self.certificates))]
        for place, row in enumerate(rows):
            parts[row] = those, place
        own = [(each, slice(*each.offsets[row : row + 2])) for each, row in parts]
        return replace(
            self,
            ids=np.concatenate([each.ids[part] for each, part in own]),
            raw=np.concatenate([each.raw[part] for each, part in own]),
            offsets=np.cumsum([0, *(part.stop - part.start for _, part in own)], dtype=np.int64),
            certificates=tuple(each.certificates[row] for each, row in parts),
        )

    def logits_of(self, first: int, token_ids: Sequence[int]) -> list[float]:
        """The raw canonical logits of a token of each row from ``first`` on."""
        ids, raw, offsets = self.ids.data, self.raw.data, self.offsets.data  # faster, one by one
        return [
            raw[bisect_left(ids, token_id, offsets[row], offsets[row + 1])]
            for row, token_id in enumerate(token_ids, first)
        ]

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Canonical logits after the processors [total], computed when asked for."""
        if self.adjustments is None or not self.adjustments.active.any():
            return self.raw
        return adjust(self.ids, self.raw, self.offsets, self.adjustments)
