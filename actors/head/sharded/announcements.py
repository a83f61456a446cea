"""What the root tells the other shards: which rows a step has, what happened to sequences, the end.

A step's row table travels as its arrays, but for processors: of a row that has some, the name of
its sequence and its guesses do, and every shard makes them from states of its own, which it keeps
from the same deltas that samplers get. A grammar's mask travels once, later its number does.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import NeedKind
from lexshard.actors.packed_arrays import read_array
from lexshard.actors.proposal import NO_TESTS
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.mask import Mask, ToldMasks
from lexshard.actors.states.need import Adjustment
from lexshard.actors.states.row_table import RowNames, RowTable, flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.draw import Controls


class StepAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step of N rows follows, hidden states with ``columns`` each, after these deltas. ``names``
    are those of the rows ``adjusted``, which have processors, ``masks`` the numbers of those that
    grammars gave them, of which ``told`` come for the first time."""

    columns: int
    kinds: tuple[NeedKind, ...]  # [N] this and the next four as in the `RowTable`
    searched: npt.NDArray[np.int64]
    controls: Controls
    min_p: npt.NDArray[np.float64]
    epsilon: npt.NDArray[np.float64]
    adjusted: tuple[int, ...]
    names: RowNames
    masks: tuple[int | None, ...] = ()  # like the names, or none
    told: dict[int, npt.NDArray[np.uint64]] = {}
    deltas: tuple[Deltas, ...] = ()

    def table(self, states: SequenceStates, masks: ToldMasks) -> RowTable:
        """The announced rows with the processors of ``states``; ``masks`` are all that have been
        told."""
        adjustments: list[Adjustment | None] = [None] * len(self.kinds)
        masks.see(self.masks, self.told)
        size = states.vocabulary_size
        own: dict[int | None, Mask | None] = {
            number: None if number is None else Mask(masks[number], size, number)
            for number in {*self.masks}
        }
        found = states.adjustments(self.names._replace(masks=tuple(map(own.get, self.masks))))
        for row, adjustment in zip(self.adjusted, found, strict=True):
            adjustments[row] = adjustment
        return RowTable(
            kinds=self.kinds,
            searched=self.searched,
            controls=self.controls,
            min_p=self.min_p,
            epsilon=self.epsilon,
            adjustments=tuple(adjustments),
            flat=flatten_adjustments(adjustments),
        )


def announce(
    rows: RowTable,
    names: RowNames | None,
    columns: int,
    masks: ToldMasks,
    deltas: tuple[Deltas, ...] = (),
) -> StepAnnouncement:
    """What travels of ``rows``; ``masks`` are those that the others have been told. Raises
    ValueError for a row with processors but without a name."""
    adjusted = tuple(row for row, each in enumerate(rows.adjustments) if each is not None)
    if names is None and adjusted:
        raise ValueError(
            f"row {adjusted[0]} has processors and no name: shards elsewhere make them from the "
            "state of its sequence, so ask for it through a SequenceHead"
        )
    own = RowNames(()) if names is None else names._replace(tests=NO_TESTS).some(adjusted)
    numbers = tuple(None if mask is None else mask.number for mask in own.masks)
    told = masks.unknown(own.masks)
    masks.see(numbers, told)
    return StepAnnouncement(
        columns,
        rows.kinds,
        rows.searched,
        rows.controls,
        rows.min_p,
        rows.epsilon,
        adjusted,
        own._replace(masks=()),
        numbers,
        told,
        deltas,
    )


class EndAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There will be no more steps."""


Announcement = StepAnnouncement | EndAnnouncement

decode_announcement = msgspec.msgpack.Decoder(Announcement, dec_hook=read_array).decode


class Introduction(msgspec.Struct, frozen=True):
    """What a shard says of itself before the first step: the tokens it owns, and of clusters where
    each begins among them (`actors.head.paper.clusters.ClusterTokens`); and whether it asks for the
    thresholds of others."""

    vocabulary_size: int
    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64] | None = None
    asks_others: bool = True


decode_introduction = msgspec.msgpack.Decoder(Introduction, dec_hook=read_array).decode
