"""The part of the head that a rank of the body has, as it is told of it: all but the rows, which it
reads from the checkpoint as it reads its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from lexshard.actors.body.head_weights import narrowed
from lexshard.actors.body.parallel.messages import RankPart
from lexshard.actors.body.parallel.slices import StoredSlices
from lexshard.actors.head.sharded.part import ShardPart
from lexshard.actors.packed_arrays import read_array


def _packed(value: Any) -> Any:
    return b"" if isinstance(value, torch.Tensor) else value.tobytes()


def _unpacked(kind: Any, value: bytes) -> Any:
    return torch.empty(0) if kind is torch.Tensor else read_array(kind, value)


# Bytes of a part without its rows; parallel bodies have no head with a bias.
pack_part = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_decode = msgspec.msgpack.Decoder(ShardPart, dec_hook=_unpacked).decode


def read_part(packed: bytes, rank: RankPart) -> ShardPart:
    """What `pack_part` packed, with its rows, where ``rank`` is. Raises what reading raises."""
    part = _decode(packed)
    slices = StoredSlices(Path(rank.folder), getattr(torch, rank.dtype))
    rows = slices(rank.head_name, part.owned.ids)
    if rows is None:
        raise KeyError(rank.head_name)
    return replace(
        part,
        weight=narrowed(rows),
        samples=None if part.samples is None else part.samples.reshape(-1, rows.shape[1]),
        device=part.device if part.device == "cpu" else rank.device or "cpu",
    )
