"""What one screen knows about the rows it served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.screens import Screen
from kernels.penalties import Adjustments, select_row
from kernels.search import Estimates, Needs


@dataclass(frozen=True, slots=True, eq=False)
class ScreenedRows:
    """Estimates of the raw logits of ``rows``, and what is searched for in them."""

    rows: npt.NDArray[np.int64]  # [S]
    screen: Screen
    estimates: Estimates  # [S, V]
    search: Needs  # S rows
    adjustments: Adjustments  # S rows
    known: npt.NDArray[np.bool_]  # [S] whether the estimates mean anything

    def one_row(self, place: int) -> tuple[Estimates, Needs, Adjustments]:
        """The same of the row at ``place`` alone."""
        one = slice(place, place + 1)
        values, row_slack, hidden_slack = self.estimates
        return (
            Estimates(values[one], row_slack, hidden_slack[one]),
            Needs(*(field[one] for field in self.search)),
            select_row(self.adjustments, place),
        )
