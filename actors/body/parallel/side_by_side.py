"""Ranks of a decoder of torch in one process, one thread each, to see that they compute its model.

No process of several ranks holds the model. Its first layers fit beside themselves, whole and in
parts, and every layer is divided in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.parallel.general_rank import GeneralRank
from lexshard.actors.body.parallel.sums import RankLostError


class SideBySide:
    """``ranks`` of one model as a body that can be checked (`actors.body.self_test`)."""

    name = "parallel"

    def __init__(self, ranks: Sequence[GeneralRank]) -> None:
        self._ranks = ranks
        self._barrier = barrier = Barrier(len(ranks))
        parts = [torch.empty(0)] * len(ranks)
        self._sums = [ThreadSums(place, parts, barrier) for place in range(len(ranks))]

    def allocate_cache(self, num_blocks: int) -> None:
        for rank in self._ranks:
            rank.allocate(num_blocks)

    def forward(self, batch: Batch) -> torch.Tensor:
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            started = [
                threads.submit(self._compute, rank, batch, sums)
                for rank, sums in zip(self._ranks, self._sums, strict=True)
            ]
            found = [each.result() for each in started]
        assert found[0] is not None, "a thread does its part, or raises"
        return found[0]

    def _compute(self, rank: GeneralRank, batch: Batch, sums: ThreadSums) -> torch.Tensor | None:
        try:
            return rank.forward(batch, sums)
        except BaseException:
            self._barrier.abort()  # the others would wait for this one
            raise


class ThreadSums:
    """`RankSums` of thread ``place``, whose values lie among the ``parts`` of all."""

    def __init__(self, place: int, parts: list[torch.Tensor], barrier: Barrier) -> None:
        self._place = place
        self._parts = parts
        self._barrier = barrier

    def add(self, values: torch.Tensor) -> None:
        self._parts[self._place] = values
        try:
            self._barrier.wait()
            if self._place == 0:
                first, *others = self._parts
                for part in others:
                    first += part
                for part in others:
                    part.copy_(first)
            self._barrier.wait()
        except BrokenBarrierError as error:
            raise RankLostError("another thread failed") from error

    def complete(self) -> bool:
        return True
