"""What the first rank of a parallel body tells the others, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.checkpoint import read_model_config
from lexshard.actors.body.fused import FusedPlan
from lexshard.actors.body.parallel.general_rank import FastLayers, GeneralRank
from lexshard.actors.body.parallel.rank import BodyRank
from lexshard.actors.body.parallel.share import RankShare
from lexshard.actors.body.parallel.slices import StoredSlices
from lexshard.actors.packed_arrays import read_array


@dataclass(frozen=True, slots=True)
class RankPart:
    """All that rank ``rank`` of ``ranks`` must know to be made: ``dtype`` is what weights are
    rounded to. On a ``device`` it is a decoder of torch, whose layers are ``fast`` there, and
    without one a compiled stack on the CPU."""

    folder: str
    dtype: str
    plan: FusedPlan
    rank: int
    ranks: int
    vocabulary_size: int
    head_name: str  # of the output weights
    device: str | None = None
    fast: FastLayers | None = None

    def build(self) -> BodyRank | GeneralRank:
        """The rank, warm: what it will call is compiled or loaded. Raises what reading raises."""
        share = RankShare(self.rank, self.ranks, self.plan.shape, self.vocabulary_size)
        dtype = getattr(torch, self.dtype)
        slices = StoredSlices(Path(self.folder), dtype)
        made: BodyRank | GeneralRank
        if self.device is None:
            made = BodyRank(self.plan, share, slices)
        else:
            config = read_model_config(Path(self.folder))
            device = torch.device(self.device)
            made = GeneralRank(config, share, slices, dtype, device, fast=self.fast)
        made.warm_up()
        return made


class FormGroup(msgspec.Struct, frozen=True, tag=True):
    """A new group: whatever was under way has ended. Answered by `GroupMember`, as all that has a
    ``question`` number."""

    question: int


class MeetGroup(msgspec.Struct, frozen=True, tag=True):
    """Where every rank listens, for those that do not share memory. ``key`` is what members of this
    group greet each other with. Answered by `GroupMember`."""

    places: tuple[tuple[str, int], ...]
    key: bytes
    question: int


class AllocateCache(msgspec.Struct, frozen=True, tag=True):
    """See `Body.allocate_cache`."""

    blocks: int


class RecordGraphs(msgspec.Struct, frozen=True, tag=True):
    """See `GraphedBody.record`."""

    sequences: int
    blocks: int


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """What a rank's GPU has left. Answered by `MemoryLeft`."""


class ComputeBatch(msgspec.Struct, frozen=True, tag=True):
    """A `Batch`, whose block tables are one row after the other."""

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    row_sequence: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    output_rows: npt.NDArray[np.int32]
    sequences: int

    @classmethod
    def of(cls, batch: Batch) -> ComputeBatch:
        tables = batch.block_tables
        return cls(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.row_sequence,
            np.ascontiguousarray(tables).reshape(-1),
            batch.output_rows,
            tables.shape[0],
        )

    @property
    def batch(self) -> Batch:
        return Batch(
            self.token_ids,
            self.positions,
            self.slots,
            self.row_sequence,
            self.block_tables.reshape(self.sequences, -1),
            self.output_rows,
        )


class ServeShard(msgspec.Struct, frozen=True, tag=True):
    """A shard of the output head that a rank is to have (`actors.head.sharded.rank_part`), empty:
    the one that it has. It is of a new group of shards. Answered by `GroupMember`, then by what
    the shard says of itself."""

    part: bytes
    question: int


class ShardMessage(msgspec.Struct, frozen=True, tag=True):
    """What shards of the head at different ranks tell each other, to one or from one."""

    content: bytes


class GroupMember(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready for the group that it was asked into by ``question``; where it listens, if it
    does."""

    question: int
    place: tuple[str, int] | None = None


class MemoryLeft(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a rank's GPU."""

    free: int
    total: int
    question: int = 0


class RankRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why a rank could not be made."""

    reason: str


ToBody = FormGroup | MeetGroup | AllocateCache | RecordGraphs | MeasureMemory | ComputeBatch
RankMessage = ToBody | ServeShard | ShardMessage
RankReply = GroupMember | RankRefusal | MemoryLeft | ShardMessage
decode_rank_message = msgspec.msgpack.Decoder(RankMessage, dec_hook=read_array).decode
decode_rank_reply = msgspec.msgpack.Decoder(RankReply).decode
