"""What an output head is: from hidden states to candidates, in two steps with room in between.

Between `OutputHead.screen` and `OutputHead.rescore` the shards of one head tell each other what
they have found (`actors.head.exchange`): thresholds, and what they know of the whole softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.softmax.whole_softmax import Mass
from lexshard.actors.states.row_table import RowTable

Hidden = torch.Tensor | npt.NDArray[np.float32]  # [N, d] fp32


class Screening:
    """What a head has found while it screened. Only the head that made it reads it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Thresholds:
    """What a screen leaves behind for the rescoring of the same rows.

    ``tau`` [N] is a value that the answer of a row certainly reaches, NaN for rows that are not
    decided by a threshold: those that need every logit or bounds on the whole softmax. The larger
    of two shards' thresholds holds for their union: `dataclasses.replace` puts it here. On a device
    it is a tensor there, and reading it waits for the search.

    ``masses`` are the rows that bounds on the whole softmax decide, where shards have agreed on
    them; without them a head decides alone.

    ``drawn`` [N] int32 lies on a device that draws for every row: what samplers will very likely
    decide, or -1 (`kernels.search.gpu.triton_draw`).
    """

    tau: npt.NDArray[np.float64] | torch.Tensor
    rows: RowTable  # [N]
    screening: Screening
    masses: Mapping[int, Mass] | None = None
    drawn: torch.Tensor | None = None


class OutputHead(Protocol):
    """The tokens of ``vocabulary_size`` that can still be drawn, with certificates.

    ``screen`` raises `actors.head.output_rows.NonFiniteHiddenError` naming the rows of ``hidden``
    that contain NaN or infinity; where hidden states are on a device, ``rescore`` does.
    """

    vocabulary_size: int

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        """Thresholds of the ``rows`` whose hidden states are ``hidden`` [N, d]."""
        ...

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """Canonical logits of every token that may reach its row's threshold, and of all tokens
        of dense rows, with a certificate per row."""
        ...


class HeadThatDraws(OutputHead, Protocol):
    """One on a device, which may draw for every row: `Thresholds.drawn`."""

    def screen(
        self, hidden: Hidden, rows: RowTable, before: torch.Tensor | None = None
    ) -> Thresholds:
        """As above; ``before`` [N] int32 are tokens on the device, one more that each row has seen
        than ``rows`` say."""
        ...
