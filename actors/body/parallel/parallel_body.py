"""A body whose layers several ranks compute together, and that outlives the loss of any but the
first.

The others replay what the first is asked for: allocate a cache, compute a step. With a rank its
part of every key and value is lost. But those are a pure function of tokens, and which token stands
in which slot of the cache is known here: a new group computes them again, those of a sequence when
it comes next, and the step that was lost is done again with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.fused import FusedPlan
from lexshard.actors.body.parallel.general_rank import GeneralRank
from lexshard.actors.body.parallel.messages import (
    AllocateCache,
    ComputeBatch,
    MemoryLeft,
    RankMessage,
    RecordGraphs,
)
from lexshard.actors.body.parallel.rank import BodyRank
from lexshard.actors.body.parallel.sums import RankGroup, RankLostError
from lexshard.actors.role import RunningRole
from lexshard.kernels.attention import BLOCK_SIZE

# Groups that are formed for one step before the body gives up.
ATTEMPTS = 4
# Tokens that are computed again in one step.
ROWS_AGAIN = 256

logger = logging.getLogger("lexshard.ranks")


class OtherRanks(Protocol):
    """The processes of all ranks but the first, which is here. `RankLostError` means that the group
    is of no use any more, and another can be formed."""

    def form(self) -> RankGroup:
        """A new group: who is missing is replaced. Raises RankLostError where none forms."""

    def tell(self, message: RankMessage) -> None:
        """To all, in order. Raises RankLostError."""

    def memory(self) -> list[MemoryLeft]:
        """What the GPU of each has left. Raises RankLostError."""

    def roles(self) -> list[RunningRole]:
        """Who they are."""

    def close(self) -> None:
        """Ends them all."""


class NoOthers:
    """Of the only rank, whose ``group`` is its own."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def form(self) -> RankGroup:
        return self._group

    def tell(self, message: RankMessage) -> None:
        """No other rank is told."""

    def memory(self) -> list[MemoryLeft]:
        return []

    def roles(self) -> list[RunningRole]:
        return []

    def close(self) -> None:
        """No other rank ends."""


class ParallelBody:
    """``own`` and its ``others``; see `actors.body.batch.Body` for the contract.

    Of compiled stacks (`BodyRank`) its bits are the same for every number of ranks. Raises
    RankLostError where no group can be formed, here and in a step.
    """

    def __init__(self, plan: FusedPlan, own: BodyRank | GeneralRank, others: OtherRanks) -> None:
        shape = plan.shape
        # Of a decoder of torch bits depend on how many add up.
        general = f"parallel general of {own.share.ranks}"
        self.name = "parallel" if isinstance(own, BodyRank) else general
        self.device = own.device
        self.batch_invariant = self.device.type == "cpu"
        self.hidden_size = shape.hidden
        self.vocabulary_size = own.share.vocabulary_size
        self.num_layers = shape.layers
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.max_positions = plan.max_positions
        self.ranks_lost = 0
        self.hidden: torch.Tensor | None = None  # of the last step, if every rank has them
        self.others = others
        self._own = own
        self._group: RankGroup | None = others.form()
        # What was last written to each slot of the cache, and whether that is lost.
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._stale: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def kv_bytes_per_block(self) -> int:
        """Of all ranks together on a CPU; of one on GPUs, each of which has memory of its own."""
        together = self._own.share.ranks if self.device.type == "cpu" else 1
        return self._own.kv_bytes_per_block * together

    def allocate_cache(self, num_blocks: int) -> None:
        self._tokens = np.full(num_blocks * BLOCK_SIZE, -1, np.int32)
        self._stale = np.zeros(num_blocks * BLOCK_SIZE, np.bool_)
        for attempt in range(ATTEMPTS):
            try:
                if self._group is None:
                    self._form()
                else:
                    self._allocate()
                return
            except RankLostError as error:
                self._lose(error, last=attempt == ATTEMPTS - 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of ``batch.output_rows`` after the final norm: ``[N, d] float32``."""
        for attempt in range(ATTEMPTS):
            try:
                if self._group is None:
                    self._form()
                if self._stale.any():
                    for lost in self._lost_before(batch):
                        self._compute(lost)
                return self._compute(batch)
            except RankLostError as error:
                self._lose(error, last=attempt == ATTEMPTS - 1)
        raise AssertionError("unreachable")

    def form_anew(self, error: RankLostError) -> None:
        """A new group, where another than the body has missed a rank. Raises RankLostError."""
        for attempt in range(ATTEMPTS):
            self._lose(error, last=attempt == ATTEMPTS - 1)
            try:
                self._form()
                return
            except RankLostError as another:
                error = another

    @property
    def description(self) -> str:
        """What is in graphs on the first rank's GPU, in words."""
        return self._own.description

    def record(self, sequences: int, blocks: int) -> None:
        """`GraphedBody.record`, on all ranks."""
        if self.device.type == "cpu":
            return
        self.others.tell(RecordGraphs(sequences, blocks))
        self._own.record(sequences, blocks)

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU that has least left: those that are free, and all."""
        others = [(each.free, each.total) for each in self.others.memory()]
        return min([self._own.memory(), *others])

    def roles(self) -> list[RunningRole]:
        """The ranks but for the first."""
        return self.others.roles()

    def close(self) -> None:
        self.others.close()

    def _compute(self, batch: Batch) -> torch.Tensor:
        assert self._group is not None
        self.others.tell(ComputeBatch.of(batch))
        found = self._own.forward(batch, self._group)
        if found is None:
            raise RankLostError("a rank did not do its part of a step")
        self._tokens[batch.slots] = batch.token_ids
        self._stale[batch.slots] = False
        self.hidden = found
        return found

    def _allocate(self) -> None:
        blocks = len(self._tokens) // BLOCK_SIZE
        self.others.tell(AllocateCache(blocks))
        self._own.allocate(blocks)

    def _form(self) -> None:
        """A new group, none of which has anything in its cache."""
        self.hidden = None
        self._group = self.others.form()
        self._stale = self._tokens >= 0
        self._allocate()

    def _lose(self, error: RankLostError, *, last: bool) -> None:
        self._group = None
        self.ranks_lost += 1
        logger.warning("a rank of the body is lost and will be replaced: %s", error)
        if last:
            raise error

    def _lost_before(self, batch: Batch) -> Iterator[Batch]:
        """Steps that compute what is lost of the tokens before those of ``batch``, its sequences
        one after the other: what several share is computed once."""
        sequences, first_rows = np.unique(batch.row_sequence, return_index=True)
        for sequence, row in zip(sequences, first_rows, strict=True):
            table = batch.block_tables[sequence]
            positions = np.arange(batch.positions[row], dtype=np.int32)
            slots = _slots(table, positions)
            lost = np.flatnonzero(self._stale[slots])
            start = int(lost[0]) if len(lost) else len(positions)
            for low in range(start, len(positions), ROWS_AGAIN):
                own = positions[low : low + ROWS_AGAIN]
                places = _slots(table, own)
                yield Batch(
                    token_ids=self._tokens[places],
                    positions=own,
                    slots=places,
                    row_sequence=np.zeros(len(own), np.int32),
                    block_tables=table[None],
                    output_rows=np.array([len(own) - 1], np.int32),
                )


def _slots(table: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    places = table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    return np.asarray(places + positions % BLOCK_SIZE, np.int64)
