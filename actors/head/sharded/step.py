"""One step of a sharded head as every process takes it, root and servers alike.

The rounds are those of `actors.head.shard_group.ShardGroup`:

    screen            every shard, its own rows
    all-reduce max    thresholds, and which rows bounds on the whole softmax may decide
    gather, broadcast where the tokens of such rows lie, and which of them to know exactly
    gather, broadcast what the shards know of the softmax of such rows, and what that decides; both
                      at most twice, by the root alone: processors may differ in the last bit of a
                      logarithm
    rescore           every shard, its own rows that may reach the threshold
    gather            candidates and certificates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Collective
from lexshard.actors.head.exchange import (
    MASS_NEEDS,
    MassBounds,
    MassShard,
    MassTries,
    decide_cuts,
    merge_candidates,
    plan_masses,
    planned,
)
from lexshard.actors.head.output_head import Hidden, Thresholds
from lexshard.actors.head.sharded.packing import (
    pack_bounds,
    pack_candidates,
    pack_cuts,
    pack_outlines,
    pack_plans,
    unpack_bounds,
    unpack_candidates,
    unpack_cuts,
    unpack_outlines,
    unpack_plans,
)
from lexshard.actors.head.whole_softmax import Cut, Mass, PartialMass
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.mass import Outline

NO_TRIES = MassTries(at_once=False, precisely=False)


@dataclass(frozen=True, slots=True, eq=False)
class AgreedScreening:
    """A shard's own screening with the thresholds of all, the ``mass_rows`` of all and how to
    bound them."""

    thresholds: Thresholds
    mass_rows: tuple[int, ...] = ()
    tries: MassTries = NO_TRIES


class ShardStep:
    """The steps of ``shard``, which is one of those that ``collective`` joins.

    ``owned_ids`` are this shard's tokens, followed at the root by those of the others in order of
    rank.
    """

    def __init__(
        self,
        shard: MassShard,
        owned_ids: Sequence[npt.NDArray[np.int32]],
        collective: Collective,
    ) -> None:
        self._shard = shard
        self._owned_ids = tuple(owned_ids)
        self._collective = collective

    def screen(self, hidden: Hidden, asked: RowTable) -> AgreedScreening:
        """Screens and agrees on thresholds."""
        own = self._shard.screen(hidden, asked)
        tau = torch.as_tensor(own.tau).cpu().numpy()
        known = ~np.isnan(tau)
        columns = [np.where(known, tau, -np.inf), known.astype(np.float64)]
        rows = [row for row, kind in enumerate(asked.kinds) if kind in MASS_NEEDS]
        if rows:
            able = set(self._shard.mass_rows(own))
            tries = self._shard.mass_tries(own) if able else NO_TRIES
            columns.append(np.array([row not in able for row in rows], np.float64))
            columns.append(np.array([not tries.at_once, tries.precisely], np.float64))
        agreed = self._collective.all_reduce_max(np.concatenate(columns))
        largest, has, unable, tried = np.split(agreed, np.cumsum([len(tau), len(tau), len(rows)]))
        common = replace(own, tau=np.where(has > 0, largest, np.nan))
        if not rows:
            return AgreedScreening(common)
        able_rows = tuple(row for row, out in zip(rows, unable.tolist(), strict=True) if not out)
        return AgreedScreening(common, able_rows, MassTries(not tried[0], bool(tried[1])))

    def rescore(self, screening: AgreedScreening) -> Candidates | None:
        """The candidates of all shards at the root, None elsewhere."""
        masses = self._agree_on_masses(screening)
        found = self._shard.rescore(replace(screening.thresholds, masses=masses))
        if self._collective.rank != ROOT:
            self._collective.gather(pack_candidates(found, len(self._owned_ids[0])))
            return None
        answers = self._collective.gather(b"")  # its own part stays where it is
        kinds = screening.thresholds.rows.kinds
        others = [
            unpack_candidates(answer, kinds, ids)
            for answer, ids in zip(answers[1:], self._owned_ids[1:], strict=True)
        ]
        return merge_candidates([found, *others], self._shard.vocabulary_size)

    def _agree_on_masses(self, screening: AgreedScreening) -> dict[int, Mass]:
        """This shard's part of the rows that bounds on the whole softmax decide."""
        side = MassBounds(self._shard, screening.thresholds, screening.mass_rows)
        for precisely, worth in zip((False, True), screening.tries, strict=True):
            if not worth or not side.left:
                continue
            needs = [screening.thresholds.rows.need(row) for row in side.left]
            plans = self._planned(needs, side.outline(precisely=precisely))
            bounds = side.bound(plans)
            side.settle(self._decided(planned(needs, plans), bounds) if bounds else [])
        return side.masses()

    def _planned(
        self, needs: Sequence[Need], outlines: Sequence[Outline | None]
    ) -> list[int | None]:
        collective = self._collective
        if collective.rank != ROOT:
            collective.gather(pack_outlines(outlines))
            return unpack_plans(collective.broadcast())
        others = [unpack_outlines(part, len(needs)) for part in collective.gather(b"")[1:]]
        plans = plan_masses(needs, [outlines, *others], self._shard.vocabulary_size)
        collective.broadcast(pack_plans(plans))
        return plans

    def _decided(self, needs: Sequence[Need], bounds: Sequence[PartialMass]) -> list[Cut | None]:
        collective = self._collective
        if collective.rank != ROOT:
            collective.gather(pack_bounds(bounds))
            return unpack_cuts(collective.broadcast())
        others = [unpack_bounds(part, len(needs)) for part in collective.gather(b"")[1:]]
        cuts = decide_cuts(needs, [bounds, *others])
        collective.broadcast(pack_cuts(cuts))
        return cuts
