"""Steps of plain rows, which a shard that owns the vocabulary decides in one compiled call.

Such rows want the best token, of all or of a nucleus, the best few or those near the best, after
any processors; nearly all do, but for those whose masks hold few tokens, all of which are computed.
What they get, certificates too, is what the steps of `actors.head.shard` give.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.certificates import Reading, search_certificates
from lexshard.actors.head.output_head import Screening, Thresholds
from lexshard.actors.head.output_rows import FEW_ALLOWED_SHARE, computes_allowed
from lexshard.actors.head.rescoring import Rescorer
from lexshard.actors.head.screen_choice import ScreenChoice
from lexshard.actors.head.screens import Screen, TierScreen
from lexshard.actors.messages import NeedKind
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.ahead import ONE_CALL, is_postponed
from lexshard.kernels.certified import Certified, DenseSlack, Rows, certified_candidates
from lexshard.kernels.decision import PackedRows, decide_packed
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.quantize import Int4Tier, Int8Tier, Tier
from lexshard.kernels.steps import AskedRows, Caller, Places, StepsTaken, take_steps

# Above this share of the vocabulary, reading all rows in order beats gathering them.
LARGEST_SHARE = 0.5
# Rows of few allowed tokens need no screen. Beside others, calls for one made a step of the demo
# 0.6 ms longer, a screen of one row more 0.15: as long, by that, at four times its products.
SCREENED_BESIDE = 2**24
KINDS: frozenset[NeedKind] = frozenset({"top1", "topk", "minp", "nucleus-draw"})


def is_plain(rows: RowTable, vocabulary_size: int, width: int) -> bool:
    """Whether a screen of a head [``vocabulary_size``, ``width``] and one threshold decide each of
    ``rows``."""
    if rows.guesses or not KINDS.issuperset(rows.kinds):
        return False
    if not len(rows.flat.masks):
        return True
    few = [computes_allowed(rows, row, vocabulary_size) for row in range(len(rows))]
    return not any(few) or (vocabulary_size * width <= SCREENED_BESIDE and not all(few))


def fewest_screened(vocabulary_size: int, width: int) -> int:
    """Steps that one call takes screen no mask of so many tokens or fewer."""
    small = vocabulary_size * width <= SCREENED_BESIDE
    return 0 if small else int(FEW_ALLOWED_SHARE * vocabulary_size)


@dataclass(frozen=True, slots=True, eq=False)
class DecidedRows(Screening):
    """What has been found at once: there is nothing left to do for the thresholds ``tau``."""

    hidden: npt.NDArray[np.float32]  # [N, d]
    tau: npt.NDArray[np.float64]  # [N]
    candidates: Candidates
    left: list[int]  # rows that draw from a nucleus in which their token may not lie


class PlainSteps:
    """The tiers of a shard that screen such steps: int8 and int4, where the shard owns the
    ``whole`` vocabulary and the model does nothing to its products."""

    def __init__(
        self,
        rescorer: Rescorer,
        panels: npt.NDArray[Any] | None,
        dense: DenseSlack,
        *,
        whole: bool,
    ) -> None:
        plain = rescorer.bias is None and rescorer.scale == 1.0 and rescorer.softcap is None
        self._weight = rescorer.weight if whole and plain else None
        self._dense = panels, dense
        self._rows: dict[str, Rows] = {}  # by the name of their tier

    def add(self, screen: TierScreen, tier: Tier) -> None:
        """One more tier, if it is of use here."""
        if self._weight is not None and isinstance(tier, Int8Tier | Int4Tier):
            self._rows[screen.name] = Rows.of(self._weight, tier, screen.block_slack, *self._dense)

    def steady(
        self,
        choice: ScreenChoice,
        screen: Screen,
        rows: RowTable,
        reading: Reading,
        drawing: PackedRows | None = None,
    ) -> SteadyRows | None:
        """Steps of ``rows`` that ``screen``, of a ``choice``, screens one after the other; None
        where it has no such call, or none yet. What they draw, ``drawing`` says, if it is drawn
        here."""
        own = None if is_postponed(ONE_CALL) else self._rows.get(screen.name)
        return None if own is None else SteadyRows(own, choice, screen, rows, reading, drawing)


class SteadyRows:
    """Steps of the same plain ``rows``, one after the other, screened by ``screen``, which is of a
    ``choice`` that hears how it went; they are drawn as ``drawing`` says."""

    def __init__(
        self,
        own: Rows,
        choice: ScreenChoice,
        screen: Screen,
        rows: RowTable,
        reading: Reading,
        drawing: PackedRows | None,
    ) -> None:
        self._own = own
        self._choice = choice
        self._screen = screen
        self._rows = rows
        self._reading = reading
        self._drawing = drawing
        self._asked = rows.search(), rows.flat, rows.controls.top_p

    def found(self, hidden: npt.NDArray[np.float32]) -> Certified | None:
        """What is left of the rows, whose hidden states are ``hidden`` [N, d]; None where that
        cannot be said, or is too much."""
        found = certified_candidates(np.ascontiguousarray(hidden), self._own, *self._asked)
        if found is None or max(_counts(found)) > self._most:
            return None
        self._record(found)
        return found

    def take(
        self,
        stack: LlamaStack,
        places: Places,
        tokens: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
        caller: Caller | None = None,
    ) -> StepsTaken | None:
        """Several steps of ``stack``, the body (`kernels.steps.take_steps`), which asks its
        ``caller`` between two; None where there is no such call for the rows."""
        packed = self._packed
        if packed is None or (packed.counts[1] >= 0).any():
            return None
        asked = AskedRows(*self._asked, packed)
        taken = take_steps(stack, self._own, asked, places, tokens, stops, self._most, caller)
        for found in (taken.found if taken.tokens else None, taken.left):
            if found is not None:
                self._record(found)
        return taken

    @property
    def _most(self) -> int:
        """Candidates that a row may have."""
        return int(LARGEST_SHARE * self._reading.size)

    def _record(self, found: Certified) -> None:
        """Tells the choice of screens how a step went."""
        kinds, rows = self._rows.kinds, len(found.members)
        # What refined estimates have ruled out the screen had left.
        counts = np.where(found.refined > 0, found.refined, np.diff(found.offsets))
        excess = int(counts.sum()) - found.leaders
        self._choice.record_candidates(self._screen, kinds, excess, self._reading.size * rows)
        # Rows that products with all weights settle cost less than steps that leave the call.
        left = rows - int(np.count_nonzero(found.members))
        tried = kinds.count("nucleus-draw") * (rows // len(kinds))
        self._choice.record_draws(self._screen, tried, left)

    def decided(self, hidden: npt.NDArray[np.float32], found: Certified) -> Thresholds:
        """What a head rescores, with the rows that may not draw from their nucleus."""
        left = np.flatnonzero(~found.members).tolist()
        step = DecidedRows(hidden, found.thresholds, self.candidates(found), left)
        return Thresholds(found.thresholds, self._rows, step)

    def drawn(self, found: Certified) -> list[int] | None:
        """The tokens of the rows; None where one is not certain of its own, or has none."""
        packed = self._packed
        if packed is None or not found.members.all():
            return None
        tokens: list[int] = decide_packed(found.ids, found.raw, found.offsets, packed).tolist()
        return None if min(tokens) < 0 else tokens

    def advance(self) -> None:
        """The next step is of the next positions."""
        one = np.uint64(1)
        np.add(self._rows.controls.position, one, self._rows.controls.position)
        if self._drawing is not None:
            np.add(self._drawing.position, one, self._drawing.position)

    def candidates(self, found: Certified) -> Candidates:
        """What was found, with certificates, in a step or in several that `take` took."""
        kinds, steps = self._rows.kinds, len(found.members) // len(self._rows.kinds)
        counts = map(sum, zip(_counts(found), found.weighed.tolist(), strict=True))
        certificates = search_certificates(
            kinds * steps, self._screen, found, list(counts), self._reading, len(kinds)
        )
        # Rows of which a call takes several steps have no processors.
        adjustments = self._rows.flat if steps == 1 else None
        return Candidates(found.ids, found.raw, found.offsets, certificates, adjustments)

    @cached_property
    def _packed(self) -> PackedRows | None:
        packed, kinds = self._drawing, self._rows.kinds
        if packed is None or "nucleus-draw" not in kinds:
            return packed
        # What is drawn from all tokens, and is of the nucleus, is what is drawn from that.
        limits = packed.limits.copy()
        limits[1, [kind == "nucleus-draw" for kind in kinds]] = 1.0
        return packed._replace(limits=limits)


def _counts(found: Certified) -> list[int]:
    """How many candidates each row has."""
    return [stop - start for start, stop in pairwise(found.offsets.tolist())]
