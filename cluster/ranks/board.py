"""Memory that the ranks of one machine share, in which they add up what they have."""

from __future__ import annotations

import numpy as np

from lexshard.actors.body.parallel.messages import MeetGroup
from lexshard.cluster.shared_memory.segment import Segment
from lexshard.kernels.parallel import (
    STOPPED,
    Exchange,
    rounds_of,
    slots_shape,
    words_of_board,
)

_PAGE = 4096


class Board:
    """What ``rank`` sees of it; ``seconds`` is how long any rank may keep another waiting."""

    def __init__(
        self, segment: Segment, rank: int, ranks: int, hidden: int, seconds: float
    ) -> None:
        words = words_of_board(ranks)
        self.segment = segment
        self._words = segment.memory[: words * 8].view(np.int64)
        shape = slots_shape(ranks, hidden)
        begin = _slots_begin(ranks)
        slots = segment.memory[begin : begin + 4 * int(np.prod(shape))]
        self.exchange = Exchange(
            rank,
            rounds_of(ranks),
            int(seconds * 1e9),
            np.zeros(1, np.int64),
            self._words,
            slots.view(np.float32).reshape(shape),
            np.zeros(0, np.int64),
        )

    def form(self) -> None:
        """See `cluster.ranks.server.Meeting`."""
        self.exchange.counted[0] = 0

    def meet(self, told: MeetGroup) -> None:
        """Whoever has this memory has met the others."""

    def leave(self) -> None:
        """Ends every wait of every rank, until `clear`."""
        self._words[STOPPED] = 1

    def clear(self) -> None:
        """As new. No rank may wait or write."""
        self._words[:] = 0
        self.exchange.counted[0] = 0


def board_bytes(ranks: int, hidden: int) -> int:
    """How much memory they share."""
    return _slots_begin(ranks) + 4 * int(np.prod(slots_shape(ranks, hidden)))


def _slots_begin(ranks: int) -> int:
    return -(-8 * words_of_board(ranks) // _PAGE) * _PAGE
