"""A shard that serves a head elsewhere: it follows the root's steps until there are no more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.actors.collective import ROOT, Collective
from lexshard.actors.head.sharded.announcements import EndAnnouncement, decode_announcement
from lexshard.actors.head.sharded.rounds import AnyShard, introduce, rounds_of
from lexshard.actors.packed_arrays import encode
from lexshard.actors.states.mask import ToldMasks
from lexshard.actors.states.sequence_state import SequenceStates


class ShardServer:
    """``shard``, which owns ``owned_ids``, as a rank other than the root of ``collective``.

    ``states`` are its own: they start empty and are kept by what the root tells. Returns when the
    root is there (`actors.head.sharded.collective_head.CollectiveHead`).
    """

    def __init__(
        self,
        shard: AnyShard,
        owned_ids: npt.NDArray[np.int32],
        states: SequenceStates,
        collective: Collective,
    ) -> None:
        if collective.rank == ROOT:
            raise ValueError(f"rank {ROOT} is the head itself")
        self._collective = collective
        self._states = states
        self._masks = ToldMasks()
        own = introduce(shard, owned_ids)
        self._step = rounds_of(shard, [own], collective)
        collective.gather(encode(own))

    def run(self) -> None:
        """Serves until the root has no more steps.

        Raises `CollectiveError` where the root or the group has gone, and whatever goes wrong here.
        Either way the group is left, so that the others notice.
        """
        try:
            while self.follow():
                pass
        finally:
            self._collective.close()

    def follow(self) -> bool:
        """Follows one announcement; False after the last."""
        announcement = decode_announcement(self._collective.broadcast(patient=True))
        if isinstance(announcement, EndAnnouncement):
            return False
        for deltas in announcement.deltas:
            self._states.apply(deltas)
        rows = announcement.table(self._states, self._masks)
        hidden = self._collective.broadcast_hidden(None, len(rows), announcement.columns)
        self._step.take(hidden, rows)
        return True
