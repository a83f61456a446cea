"""A shard of the output head: from hidden states to the tokens that can still be drawn.

Two steps, with room for an exchange between shards: `Shard.screen` finds per row a threshold that
the answer certainly reaches, `Shard.rescore` gives the canonical logits of every token that may
reach it, with a certificate. What screens is a ladder's affair; callers see `Thresholds.tau` only,
and what `Shard.bound_masses` tells of the whole softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.certificates import (
    Reading,
    SearchCost,
    step_certificates,
)
from lexshard.actors.head.exchange import HOPELESS_SHARE, MASS_NEEDS, MassTries, decide_masses
from lexshard.actors.head.ladder import Choices, Ladder
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.output_rows import few_allowed, own_rows, refuse_unsound
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.plain_steps import (
    LARGEST_SHARE,
    DecidedRows,
    PlainSteps,
    SteadyRows,
    is_plain,
)
from lexshard.actors.head.rescoring import Rescorer
from lexshard.actors.head.screen_choice import ScreenChoice
from lexshard.actors.head.screens import (
    DenseScreen,
    FineRows,
    Linear,
    Screen,
    ScreenedRows,
    TierScreen,
    hidden_norms,
    postprocess_estimates,
)
from lexshard.actors.head.softmax.guess_tests import decide_guesses
from lexshard.actors.head.softmax.nucleus_draws import certain_draws
from lexshard.actors.head.softmax.whole_softmax import (
    Mass,
    OutlinedRow,
    PartialMass,
    bound_mass,
)
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.decision import PackedRows
from lexshard.kernels.linear import PackedWeight
from lexshard.kernels.linear import linear as multiply
from lexshard.kernels.mass import Outline, outline
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.screen import WORTH_REFINING
from lexshard.kernels.search import (
    Estimates,
    find_candidates,
    find_leaders,
    find_thresholds,
    narrow,
)


@dataclass(frozen=True, slots=True, eq=False)
class ShardScreening(Screening):
    """What a `Shard` keeps of a screen; rows of the vocabulary are numbered as its own."""

    hidden: npt.NDArray[np.float32]  # [N, d]
    adjustments: Adjustments  # of the shard's own rows
    screened: ScreenedRows | None
    best: npt.NDArray[np.float64]  # [N] the best leader after adjustment, -inf where there is none
    masked: Mapping[int, npt.NDArray[np.int32]]  # by row: all tokens that few allowed ones are
    draws: bool  # from nuclei: their rows have thresholds, as if they drew from all tokens
    bounds: bool  # on the whole softmax are worth a try
    settled: set[int] = field(default_factory=set)  # of these, rows that need no such bounds
    outlined: dict[int, OutlinedRow] = field(default_factory=dict)  # by row, of the last try


class Shard:
    """The output rows of one shard and their canonical logits.

    ``weight`` [V, d] fp32 or bf16, ``bias`` [V] or None; then the model's own ``scale`` and
    ``softcap`` (see `kernels.rows.postprocess`). Rows at or beyond ``vocabulary_size``, the
    tokenizer's, are padding and never candidates. ``owned`` says which tokens the rows are, where
    they are not all of the vocabulary: then there is one row for each of its ids, in their order.
    Candidates, rows and adjustments speak of the vocabulary's token ids all the same. ``ladder``
    holds low-precision copies of the rows to screen with; without one every screen is dense.
    ``linear`` replaces the fp32 product ``hidden @ weight.T`` -> [N, V or vocabulary_size] of the
    dense screen; it must add up fp32 products in fp32, in any order, without bias. Packed weights
    do so in one call with all else, too; without either, bf16 weights are kept in fp32 as well.

    Raises `ValueError` where shapes do not fit or the weights are not finite.
    """

    asks_others = True  # a larger threshold leaves it fewer rows to compute

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        scale: float,
        vocabulary_size: int,
        linear: Linear | PackedWeight | None = None,
        ladder: Ladder | None = None,
        owned: OwnedRows | None = None,
    ) -> None:
        self.owned = OwnedRows.every(vocabulary_size) if owned is None else owned
        if self.owned.vocabulary_size != vocabulary_size:
            raise ValueError("the owned rows are of another vocabulary")
        self._size = len(self.owned.ids)
        rows, biases = own_rows(weight, bias, self._size)
        self.vocabulary_size = vocabulary_size
        self.weight = rows
        self._rescorer = Rescorer(rows, biases, scale, softcap)
        panels = linear.panels if isinstance(linear, PackedWeight) else None
        if isinstance(linear, PackedWeight):
            linear = partial(multiply, weight=linear)
        self._dense = DenseScreen(rows, linear)
        screens: list[Screen] = [self._dense]
        dense = (panels, self._dense.slack)
        self._plain = PlainSteps(self._rescorer, *dense, whole=self.owned.whole)
        self._fine: FineRows | None = None
        if ladder is not None:
            for name, tier in ladder.tiers.items():
                if len(tier.scale) != self._size or tier.columns != rows.shape[1]:
                    raise ValueError(f"tier {name} does not fit the output weights")
                screen = TierScreen(name, tier)
                screens.append(screen)
                self._plain.add(screen, tier)
            self._fine = None if ladder.fine is None else FineRows(ladder.fine)
        self._choice = ScreenChoice(self._dense, screens, ladder)
        self._rows = np.arange(self._size, dtype=np.int32)
        self._reading = Reading(
            size=self._size,
            dense_pass=self._dense.bytes_per_pass,
            row=self._rescorer.row_bytes,
            refined_row=0 if self._fine is None else self._fine.bytes_per_row,
        )

    def start_with(self, choices: Choices, for_several: Choices | None = None) -> None:
        """Which tiers later steps are screened with first (see `Ladder`)."""
        self._choice.start_with(choices, for_several)

    # -- screening --------------------------------------------------------------------------------

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        """Thresholds of the ``rows`` whose hidden states are ``hidden`` [N, d] fp32.

        Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        array = hidden.numpy() if isinstance(hidden, torch.Tensor) else hidden
        if len(rows) != len(array):
            raise ValueError(f"{len(array)} hidden states of {len(rows)} rows")
        if not self._is_plain(rows):
            return self._screen_in_steps(array, rows)
        screen = self._choice.next_for(rows.kinds, draws=self._draws(rows))
        steady = self._plain.steady(self._choice, screen, rows, self._reading)
        found = None if steady is None else steady.found(array)
        if steady is None or found is None:
            return self._screen_in_steps(array, rows, screen)
        return steady.decided(array, found)

    def steady(self, rows: RowTable, drawing: PackedRows) -> SteadyRows | None:
        """Steps of ``rows``, one after the other, which draw as ``drawing`` says from what their
        masks hold; None where several calls decide one."""
        if not self._is_plain(rows):
            return None
        screen = self._choice.next_for(rows.kinds, draws=self._draws(rows))
        return self._plain.steady(self._choice, screen, rows, self._reading, drawing)

    def _is_plain(self, rows: RowTable) -> bool:
        return is_plain(rows, self.vocabulary_size, self.weight.shape[1])

    def _draws(self, rows: RowTable) -> bool:
        """Whether rows draw from their nucleus and are searched as if they drew from all: a shard
        of some tokens alone does not know what is drawn."""
        return self.owned.whole and "nucleus-draw" in rows.kinds

    def _screen_in_steps(
        self, array: npt.NDArray[np.float32], rows: RowTable, chosen: Screen | None = None
    ) -> Thresholds:
        """`screen` for every kind of row, by the screen that is ``chosen`` or will be."""
        refuse_unsound(np.isfinite(hidden_norms(array)))
        adjustments = self.owned.of_rows(rows.flat)
        # Rows whose mass cannot be certified lately go the dense way at once, and so do tests.
        draws, bounds = self._draws(rows), self._worth_a_try(set(rows.kinds))
        out = {"dense"} if bounds else {"dense", *MASS_NEEDS}
        out -= {"nucleus-draw"} if draws else set()
        tested = rows.guesses if rows.guesses and self._worth_testing() else ()
        masked = few_allowed(rows, self.owned)
        searched = [
            row
            for row, kind in enumerate(rows.kinds)
            if (kind not in out or row in tested) and row not in masked
        ]
        tau, best = np.full(len(rows), np.nan), np.full(len(rows), -np.inf)
        screened = None
        if searched:
            kinds = [rows.kinds[row] for row in searched]
            screen = chosen or self._choice.next_for(kinds, draws=draws)
            screened = self._screened(screen, searched, array, rows, adjustments)
            self._find_thresholds(screened, array, rows, tau, best, draws=draws)
        step = ShardScreening(array, adjustments, screened, best, masked, draws, bounds)
        return Thresholds(tau, rows, step)

    def _worth_a_try(self, kinds: Set[str]) -> bool:
        return kinds.isdisjoint(MASS_NEEDS) or self._choice.allows("mass")

    def _worth_testing(self) -> bool:
        """A shard of some tokens alone knows nothing of the others that a guess is tested with."""
        return self.owned.whole and self._choice.allows("tests")

    def _screened(
        self,
        screen: Screen,
        searched: Sequence[int],
        hidden: npt.NDArray[np.float32],
        rows: RowTable,
        adjustments: Adjustments,
    ) -> ScreenedRows:
        every = len(searched) == len(rows)
        states = hidden if every else hidden[searched]
        estimates = self.owned.locate(self._postprocess(screen(states)))
        known = np.logical_and.reduce(np.isfinite(estimates.hidden_slack), axis=1)
        if not known.all():
            slack = np.where(known[:, None], estimates.hidden_slack, 0.0)
            estimates = estimates._replace(hidden_slack=slack)
        if not every:
            rows = rows.some(searched)
            adjustments = self.owned.of_rows(rows.flat)
        search = rows.search()
        leaders = find_leaders(estimates, self._size, search, adjustments)
        return ScreenedRows(
            np.array(searched, np.int64), screen, estimates, search, adjustments, known, leaders
        )

    def _postprocess(
        self, estimates: Estimates, ids: npt.NDArray[np.int32] | None = None
    ) -> Estimates:
        rescorer = self._rescorer
        bias = rescorer.bias
        if bias is not None and ids is not None:
            bias = bias[ids]
        return postprocess_estimates(estimates, bias, rescorer.scale, rescorer.softcap)

    def _find_thresholds(
        self,
        screened: ScreenedRows,
        hidden: npt.NDArray[np.float32],
        rows: RowTable,
        tau: npt.NDArray[np.float64],
        best: npt.NDArray[np.float64],
        *,
        draws: bool,
    ) -> None:
        """Fills ``tau`` of the rows that a threshold decides, and the best leader of each row."""
        ids, offsets = screened.leaders.ids, screened.leaders.offsets
        own = hidden if len(screened.rows) == len(rows) else hidden[screened.rows]
        exact = self._rescorer.adjusted(own, ids, offsets, screened.adjustments)
        found = find_thresholds(self.owned.tokens(ids), exact, offsets, screened.search)
        out = {*MASS_NEEDS, "dense"} - ({"nucleus-draw"} if draws else set())
        decided = screened.known & [rows.kinds[row] not in out for row in screened.rows]
        tau[screened.rows[decided]] = found[decided]
        for place in np.flatnonzero(screened.adjustments.active).tolist():
            own_logits = exact[offsets[place] : offsets[place + 1]]
            best[screened.rows[place]] = own_logits.max(initial=-np.inf)

    # -- rescoring --------------------------------------------------------------------------------

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """Canonical logits of every token that may reach its row's threshold, and of all tokens
        of dense rows, with a certificate per row."""
        decided = thresholds.screening
        if isinstance(decided, DecidedRows):
            if thresholds.tau is decided.tau:
                asked, found = thresholds.rows, decided.candidates
                return self._with_draws(found, asked, decided.hidden, decided.left)
            own = self._screen_in_steps(decided.hidden, thresholds.rows)
            thresholds = replace(thresholds, screening=own.screening)
        step, asked = _screening(thresholds), thresholds.rows
        lists: list[npt.NDArray[np.int32] | None] = [None] * len(asked)
        for row, few in step.masked.items():
            lists[row] = few
        masses: dict[int, Mass] = {}
        left: list[int] = []
        cost = SearchCost(np.zeros(len(lists), np.int64), np.zeros(len(lists)), masses, step.masked)
        if step.screened is not None:
            self._decide_by_threshold(thresholds, step.screened, lists, cost)
            if step.draws:
                left = self._uncertain_draws(thresholds, step.screened, lists, cost)
        if thresholds.masses is not None:
            masses |= thresholds.masses
        elif not set(asked.kinds).isdisjoint(MASS_NEEDS):
            masses |= decide_masses([self], [thresholds])[0]
        emitted = self._test_guesses(thresholds)
        masses |= emitted
        for row, mass in masses.items():
            lists[row] = self.owned.rows(mass.ids)
        dense = [row for row, rows in enumerate(lists) if rows is None]
        counts = [self._size if rows is None else len(rows) for rows in lists]
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        ids = np.concatenate([self._rows if each is None else each for each in lists])
        raw = self._rescorer.raw(step.hidden, ids, offsets, dense)
        for row in np.flatnonzero(~step.adjustments.active).tolist():
            step.best[row] = raw[offsets[row] : offsets[row + 1]].max(initial=-np.inf)
        step.best[list(emitted)] = -np.inf  # what is emitted need not be best
        candidates = Candidates(
            ids=self.owned.tokens(ids),
            raw=raw,
            offsets=offsets,
            certificates=step_certificates(
                asked.kinds,
                step.screened,
                (step.best, offsets),
                dense,
                cost,
                self._reading,
            ),
            adjustments=asked.flat,
        )
        return self._with_draws(candidates, asked, step.hidden, left)

    def _with_draws(
        self,
        candidates: Candidates,
        rows: RowTable,
        hidden: npt.NDArray[np.float32],
        left: Sequence[int],
    ) -> Candidates:
        """``candidates``, but of rows that are ``left`` because their token may not lie in the
        nucleus that they draw from what the dense screen's bounds tell, or all logits."""
        if not left:
            return candidates
        found = self.rescore(self._screen_in_steps(hidden[left], rows.some(left), self._dense))
        again = tuple(replace(each, fallback=True) for each in found.certificates)
        return candidates.with_rows(left, replace(found, certificates=again))

    def _decide_by_threshold(
        self,
        thresholds: Thresholds,
        screened: ScreenedRows,
        lists: list[npt.NDArray[np.int32] | None],
        cost: SearchCost,
    ) -> None:
        """Fills in the candidates of rows that have a threshold."""
        tau = np.asarray(thresholds.tau)[screened.rows]
        # A threshold of another shard is of no use where this one's estimates say nothing.
        decided = screened.known & ~np.isnan(tau)
        if not decided.any():
            return
        # Rows without a threshold reach none.
        tau = np.where(decided, tau, np.inf)
        search, adjustments = screened.search, screened.adjustments
        ids, offsets, cost.largest[screened.rows] = find_candidates(
            screened.estimates,
            self._size,
            search,
            adjustments,
            tau,
            screened.leaders,
        )
        counts = np.diff(offsets)
        if screened.screen is not self._dense:
            kinds = [thresholds.rows.kinds[row] for row in screened.rows]
            excess = int(counts.sum()) - len(screened.leaders.ids)
            self._choice.record_candidates(
                screened.screen, kinds, excess, self._size * int(decided.sum())
            )
            if self._refines(screened.screen) and counts.max() > WORTH_REFINING:
                assert self._fine is not None
                hidden = _screening(thresholds).hidden[screened.rows]
                better = self._postprocess(self._fine(hidden, ids, offsets), ids)
                if np.isfinite(better.hidden_slack).all():
                    cost.refined[screened.rows] = counts
                    better = self.owned.locate(better)
                    ids, offsets = narrow(better, ids, offsets, search, adjustments, tau)
        for place in np.flatnonzero(decided).tolist():
            own = ids[offsets[place] : offsets[place + 1]]
            if len(own) <= LARGEST_SHARE * self._size:
                lists[screened.rows[place]] = own

    def _uncertain_draws(
        self,
        thresholds: Thresholds,
        screened: ScreenedRows,
        lists: list[npt.NDArray[np.int32] | None],
        cost: SearchCost,
    ) -> list[int]:
        """The rows whose token may lie outside of the nucleus that they draw from, and of which the
        dense screen may tell; where it is what screened them, their candidates are taken back."""
        step, asked = _screening(thresholds), thresholds.rows
        drawing = {
            row: ids
            for row in screened.rows.tolist()
            if asked.kinds[row] == "nucleus-draw" and (ids := lists[row]) is not None
        }
        tight = screened.screen is self._dense
        rescoring = (cost.largest, self._rescorer, step.hidden)
        found = certain_draws(screened, drawing, *rescoring, asked, tight=tight)
        for row, draw in found.items():
            lists[row], cost.computed[row] = draw.ids, draw.computed
        left = [row for row in drawing if row not in found]
        self._choice.record_draws(screened.screen, len(drawing), len(left))
        if not tight:
            step.settled.update(drawing)
            return left
        step.settled.update(found)
        for row in left:
            lists[row] = None
        return []

    def _test_guesses(self, thresholds: Thresholds) -> dict[int, Mass]:
        """What rows that test a guess emit, where bounds tell: those that screened the step or,
        where they were too loose, the dense screen's."""
        step, asked = _screening(thresholds), thresholds.rows
        screened = step.screened
        if screened is None:
            return {}
        tested = [row for row in screened.rows.tolist() if row in asked.guesses]
        if not tested:
            return {}
        found: dict[int, Mass] = {}
        if self._choice.allows("tests", screened.screen):
            found = decide_guesses(screened, tested, self._rescorer, step.hidden, asked)
            self._choice.record("tests", screened.screen, failed=_hopeless(found, tested))
        left = [row for row in tested if row not in found]
        if left and screened.screen is not self._dense:
            better = self._screened(self._dense, left, step.hidden, asked, step.adjustments)
            found |= decide_guesses(
                better, left, self._rescorer, step.hidden, asked, precisely=True
            )
        self._choice.record("tests", failed=_hopeless(found, tested))
        return found

    def _refines(self, screen: Screen) -> bool:
        """Whether what ``screen`` leaves has estimates that can be bettered cheaply."""
        fine = self._fine
        return fine is not None and screen.bytes_per_pass < self._size * fine.bytes_per_row

    # -- the whole softmax ------------------------------------------------------------------------

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        """The rows that bounds on the whole softmax may decide."""
        if isinstance(thresholds.screening, DecidedRows):
            return []
        step, kinds = _screening(thresholds), thresholds.rows.kinds
        if step.screened is None or not step.bounds:
            return []
        rows: list[int] = step.screened.rows.tolist()
        return [row for row in rows if kinds[row] in MASS_NEEDS and row not in step.settled]

    def mass_tries(self, thresholds: Thresholds) -> MassTries:
        """Whether the bounds of the screen are worth a try now, and whether the dense one's are
        better."""
        screened = _screening(thresholds).screened
        assert screened is not None
        at_once = self._choice.allows("mass", screened.screen)
        return MassTries(at_once, screened.screen is not self._dense)

    def outline_masses(
        self, thresholds: Thresholds, rows: Sequence[int], *, precisely: bool
    ) -> list[Outline | None]:
        """Where this shard's tokens lie in ``rows``, by the estimates that screened the step or,
        ``precisely``, by the dense screen's."""
        step = _screening(thresholds)
        screened = step.screened
        assert screened is not None
        if precisely and screened.screen is not self._dense:
            screened = self._screened(
                self._dense, rows, step.hidden, thresholds.rows, step.adjustments
            )
        place = {row: index for index, row in enumerate(screened.rows.tolist())}
        step.outlined.clear()
        for row in rows:
            if screened.known[place[row]]:
                own = screened.one_row(place[row])
                estimates, search, adjustments = own
                [found] = outline(estimates, self._size, search, adjustments)
                step.outlined[row] = OutlinedRow(own, found)
        return [step.outlined[row].outline if row in step.outlined else None for row in rows]

    def bound_masses(self, thresholds: Thresholds, lowest: Mapping[int, int]) -> list[PartialMass]:
        """What this shard knows of the softmax of rows that it has outlined last, the tokens from
        their ``lowest`` bins on exactly."""
        step = _screening(thresholds)
        return [self._bound(step, row, start) for row, start in lowest.items()]

    def _bound(self, step: ShardScreening, row: int, lowest: int) -> PartialMass:
        own, outline = step.outlined[row]
        assert outline is not None
        exact = partial(self._rescorer.of_row, step.hidden[row : row + 1], own[2])
        return bound_mass(own, self.owned, outline.count_from(lowest), exact)

    def record_bounds(self, thresholds: Thresholds, *, failed: bool) -> None:
        """Whether the bounds that screened the step were too loose for most of its rows."""
        screened = _screening(thresholds).screened
        assert screened is not None
        self._choice.record("mass", screened.screen, failed=failed)

    def record_masses(self, *, failed: bool) -> None:
        """Whether no bounds were tight enough for most rows of a step."""
        self._choice.record("mass", failed=failed)


def _screening(thresholds: Thresholds) -> ShardScreening:
    assert isinstance(thresholds.screening, ShardScreening)
    return thresholds.screening


def _hopeless(found: Mapping[int, Mass], tested: Sequence[int]) -> bool:
    return len(tested) - len(found) > HOPELESS_SHARE * len(tested)
