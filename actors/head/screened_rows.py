"""What one screen knows about the rows it served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.head.screens import Screen
from actors.head.whole_softmax import SoftmaxRow
from kernels.penalties import Adjustments, select_row
from kernels.search import Estimates, Leaders, Needs


@dataclass(frozen=True, slots=True, eq=False)
class ScreenedRows:
    """Estimates of the raw logits of ``rows``, and what is searched for in them."""

    rows: npt.NDArray[np.int64]  # [S]
    screen: Screen
    estimates: Estimates  # [S, V]
    search: Needs  # S rows
    adjustments: Adjustments  # S rows
    known: npt.NDArray[np.bool_]  # [S] whether the estimates mean anything
    leaders: Leaders

    def one_row(self, place: int) -> SoftmaxRow:
        """The same of the row at ``place`` alone."""
        return one_row(self.estimates, self.search, self.adjustments, place)


def one_row(
    estimates: Estimates, search: Needs, adjustments: Adjustments, place: int
) -> SoftmaxRow:
    """The row at ``place`` of several."""
    one = slice(place, place + 1)
    return (
        estimates._replace(values=estimates.values[one], hidden_slack=estimates.hidden_slack[one]),
        search._replace(**{n: f[one] for n, f in search._asdict().items()}),
        select_row(adjustments, place),
    )
