"""One step of a sharded head as every process takes it, root and servers alike.

In rounds:

    screen            every shard, its own rows
    all-reduce max    thresholds, and which rows bounds on the whole softmax may decide; not of
                      shards on GPUs, which have computed by their own what reaches them
    gather, broadcast where the tokens of such rows lie, and which of them to know exactly
    gather, broadcast what the shards know of the softmax of such rows, and what that decides; both
                      at most twice, by the root alone: processors may differ in the last bit of a
                      logarithm
    rescore           every shard, its own rows that may reach the threshold
    gather            candidates and certificates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Rounds
from lexshard.actors.head.exchange import (
    MASS_NEEDS,
    AnyMassShard,
    MassShard,
    MassTries,
    agree_on_masses,
    decide_cuts,
    merge_candidates,
    plan_masses,
)
from lexshard.actors.head.output_head import Hidden, Thresholds
from lexshard.actors.head.sharded.packing import (
    decode_bounds,
    decode_cuts,
    decode_outlines,
    decode_plans,
    pack_candidates,
    unpack_candidates,
)
from lexshard.actors.head.softmax.whole_softmax import Cut, Mass, PartialMass
from lexshard.actors.packed_arrays import encode
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.mass import Outline

NO_TRIES = MassTries(at_once=False, precisely=False)


class ShardStep:
    """The steps of ``shard``, which is one of those that ``collective`` joins.

    ``owned_ids`` are this shard's tokens, followed at the root by those of the others in order of
    rank.
    """

    def __init__(
        self,
        shard: AnyMassShard,
        owned_ids: Sequence[npt.NDArray[np.int32]],
        collective: Rounds,
    ) -> None:
        self._shard = shard
        self._owned_ids = tuple(owned_ids)
        self._collective = collective
        self._is_root = collective.rank == ROOT

    def take(self, hidden: Hidden, asked: RowTable) -> Candidates | None:
        """The candidates of all shards at the root, None elsewhere."""
        thresholds, rows, tries = self._screen(hidden, asked)
        masses: dict[int, Mass] = {}
        if rows:
            shard = cast(MassShard, self._shard)
            [masses] = agree_on_masses([shard], [thresholds], rows, tries, self._plan, self._decide)
        found = self._shard.rescore(replace(thresholds, masses=masses))
        if not self._is_root:
            self._collective.gather(pack_candidates(found, len(self._owned_ids[0])))
            return None
        answers = self._collective.gather(b"")  # its own part stays where it is
        others = map(unpack_candidates, answers[1:], self._owned_ids[1:])
        return merge_candidates([found, *others], self._shard.vocabulary_size)

    def _screen(self, hidden: Hidden, asked: RowTable) -> tuple[Thresholds, list[int], MassTries]:
        """This shard's screening with the thresholds of all, the rows of which bounds on the whole
        softmax may decide, and how to bound them."""
        own = self._shard.screen(hidden, asked)
        if not self._shard.asks_others:
            return own, [], NO_TRIES
        tau = torch.as_tensor(own.tau).cpu().numpy()
        known = ~np.isnan(tau)
        columns = [np.where(known, tau, -np.inf), known.astype(np.float64)]
        rows = [row for row, kind in enumerate(asked.kinds) if kind in MASS_NEEDS]
        if rows:
            able = set(self._shard.mass_rows(own))
            tries = cast(MassShard, self._shard).mass_tries(own) if able else NO_TRIES
            columns.append(np.array([row not in able for row in rows], np.float64))
            columns.append(np.array([not tries.at_once, tries.precisely], np.float64))
        agreed = self._collective.all_reduce_max(np.concatenate(columns))
        largest, has, unable, tried = np.split(agreed, np.cumsum([len(tau), len(tau), len(rows)]))
        common = replace(own, tau=np.where(has > 0, largest, np.nan))
        if not rows:
            return common, [], NO_TRIES
        able_rows = [row for row, out in zip(rows, unable.tolist(), strict=True) if not out]
        return common, able_rows, MassTries(not tried[0], bool(tried[1]))

    def _plan(
        self, needs: Sequence[Need], outlines: Sequence[Sequence[Outline | None]]
    ) -> list[int | None]:
        collective = self._collective
        if not self._is_root:
            collective.gather(encode(outlines[0]))
            return decode_plans(collective.broadcast())
        others = map(decode_outlines, collective.gather(b"")[1:])
        plans = plan_masses(needs, [*outlines, *others], self._shard.vocabulary_size)
        collective.broadcast(encode(plans))
        return plans

    def _decide(
        self, needs: Sequence[Need], bounds: Sequence[Sequence[PartialMass]]
    ) -> list[Cut | None]:
        collective = self._collective
        if not self._is_root:
            collective.gather(encode(bounds[0]))
            return decode_cuts(collective.broadcast())
        others = map(decode_bounds, collective.gather(b"")[1:])
        cuts = decide_cuts(needs, [*bounds, *others])
        collective.broadcast(encode(cuts))
        return cuts
