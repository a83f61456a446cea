"""Ranks of a parallel body as threads of this process, with memory that all share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from lexshard.actors.body.parallel.messages import (
    AllocateCache,
    ComputeBatch,
    RankMessage,
    RankPart,
    decode_rank_message,
)
from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.packed_arrays import encode
from lexshard.actors.role import RunningRole
from lexshard.kernels.parallel import (
    STOPPED,
    Exchange,
    rounds_of,
    slots_shape,
    words_of_board,
)

SECONDS = 30.0


class ThreadRanks:
    """`OtherRanks`; what is told goes as the bytes that a link would carry."""

    def __init__(self, parts: Sequence[RankPart]) -> None:
        self._parts = parts
        self._queues: list[SimpleQueue[bytes | None]] = []
        self._words = np.zeros(1, np.int64)
        self.formed = 0
        self.computed_rows = 0

    def form(self) -> Exchange:
        self.close()
        ranks, hidden = len(self._parts) + 1, self._parts[0].plan.shape.hidden
        self._words = np.zeros(words_of_board(ranks), np.int64)
        slots = np.zeros(slots_shape(ranks, hidden), np.float32)
        exchanges = [
            Exchange(
                rank,
                rounds_of(ranks),
                int(SECONDS * 1e9),
                np.zeros(1, np.int64),
                self._words,
                slots,
                np.zeros(0, np.int64),
            )
            for rank in range(ranks)
        ]
        for part in self._parts:
            messages: SimpleQueue[bytes | None] = SimpleQueue()
            self._queues.append(messages)
            told = (part, exchanges[part.rank], messages)
            threading.Thread(target=_serve, args=told, daemon=True).start()
        self.formed += 1
        return exchanges[0]

    def lose(self) -> None:
        """The last rank is gone: all waits for it end."""
        self._queues[-1].put(None)
        self._words[STOPPED] = 1

    def tell(self, message: RankMessage) -> None:
        if isinstance(message, ComputeBatch):
            self.computed_rows += len(message.token_ids)
        for messages in self._queues:
            messages.put(encode(message))

    def roles(self) -> list[RunningRole]:
        return []

    def close(self) -> None:
        self._words[STOPPED] = 1
        for messages in self._queues:
            messages.put(None)
        self._queues = []


@dataclass
class NeverFormed:
    """`OtherRanks` that are lost before they have begun."""

    asked: int = 0

    def form(self) -> Exchange:
        self.asked += 1
        raise RankLostError("no peer came")

    def tell(self, message: RankMessage) -> None: ...

    def roles(self) -> list[RunningRole]:
        return []

    def close(self) -> None: ...


def _serve(part: RankPart, exchange: Exchange, messages: SimpleQueue[bytes | None]) -> None:
    rank = part.build()
    while (packed := messages.get()) is not None:
        match decode_rank_message(packed):
            case AllocateCache(blocks):
                rank.allocate(blocks)
            case ComputeBatch() as told:
                rank.forward(told.batch, exchange)
