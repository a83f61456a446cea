"""Steps of plain rows, which a shard that owns the vocabulary decides in one compiled call.

Such rows want the best token, of all or of a nucleus, the best few or those near the best, after
any processors but a mask of few tokens; nearly all do. What they get, certificates too, is what the
steps of `actors.head.shard` give.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.certificates import Reading, search_certificates
from lexshard.actors.head.output_head import Screening
from lexshard.actors.head.output_rows import computes_allowed
from lexshard.actors.head.rescoring import Rescorer
from lexshard.actors.head.screens import Screen, TierScreen
from lexshard.actors.messages import NeedKind
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.certified import Rows, certified_candidates
from lexshard.kernels.quantize import Int8Tier, Tier

# Above this share of the vocabulary, reading all rows in order beats gathering them.
LARGEST_SHARE = 0.5
KINDS: frozenset[NeedKind] = frozenset({"top1", "topk", "minp", "nucleus-draw"})


def is_plain(rows: RowTable, vocabulary_size: int) -> bool:
    """Whether a screen and one threshold decide each of ``rows``."""
    if rows.guesses or not KINDS.issuperset(rows.kinds):
        return False
    return not len(rows.flat.masks) or not any(
        computes_allowed(rows, row, vocabulary_size) for row in range(len(rows))
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecidedRows(Screening):
    """What has been found at once: there is nothing left to do for the thresholds ``tau``."""

    hidden: npt.NDArray[np.float32]  # [N, d]
    tau: npt.NDArray[np.float64]  # [N]
    candidates: Candidates
    excess: int  # candidates beside the tokens that set the thresholds
    left: list[int]  # rows that draw from a nucleus in which their token may not lie


class PlainSteps:
    """The tiers of a shard that screen such steps: int8, where the shard owns the ``whole``
    vocabulary and the model does nothing to its products."""

    def __init__(self, rescorer: Rescorer, *, whole: bool) -> None:
        plain = rescorer.bias is None and rescorer.scale == 1.0 and rescorer.softcap is None
        self._weight = rescorer.weight if whole and plain else None
        self._rows: dict[str, Rows] = {}  # by the name of their tier

    def add(self, screen: TierScreen, tier: Tier) -> None:
        """One more tier, if it is of use here."""
        if self._weight is not None and isinstance(tier, Int8Tier):
            self._rows[screen.name] = Rows.of(self._weight, tier, screen.block_slack)

    def decide(
        self, screen: Screen, hidden: npt.NDArray[np.float32], rows: RowTable, reading: Reading
    ) -> DecidedRows | None:
        """The candidates of ``rows``, whose hidden states are ``hidden`` [N, d]. None where the
        steps must do it: the screen has no such call, says nothing, or leaves too many tokens."""
        own = self._rows.get(screen.name)
        if own is None:
            return None
        found = certified_candidates(
            np.ascontiguousarray(hidden), own, rows.search(), rows.flat, rows.controls.top_p
        )
        if found is None:
            return None
        counts = [stop - start for start, stop in pairwise(found.offsets.tolist())]
        if max(counts) > LARGEST_SHARE * reading.size:
            return None
        computed = [sum(each) for each in zip(counts, found.weighed.tolist(), strict=True)]
        certificates = search_certificates(rows.kinds, screen, found, computed, reading)
        candidates = Candidates(found.ids, found.raw, found.offsets, certificates, rows.flat)
        excess, left = len(found.ids) - found.leaders, np.flatnonzero(~found.members).tolist()
        return DecidedRows(hidden, found.thresholds, candidates, excess, left)
