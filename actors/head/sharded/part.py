"""One shard's part of a model's head: all that a process must know to be that shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from actors.configuration import TierName
from actors.head.calibration import calibrate, choose
from actors.head.ladder import Ladder
from actors.head.owned_rows import OwnedRows
from actors.head.screens import DENSE
from actors.head.shard import Shard
from kernels.linear import linear, pack
from kernels.quantize import Tier, quantize


@dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """The ``owned`` rows of a head, and how to find tokens among them.

    They are screened with the fastest of ``tiers``, which are made and timed where the shard is, on
    ``samples`` of hidden states, in steps of up to ``largest`` rows; the dense screen competes
    where it is not ``certified``. ``directions`` are those that the hidden states have in common,
    for tiers that are better with one (`kernels.quantize`). Without tiers every screen is dense.
    """

    weight: torch.Tensor  # [n, d] fp32 or bf16, its rows alone
    bias: torch.Tensor | None  # [n] fp32
    softcap: float | None
    scale: float
    owned: OwnedRows
    eos_ids: tuple[int, ...]
    largest: int
    tiers: tuple[TierName, ...] = ()
    directions: Mapping[TierName, npt.NDArray[np.float32]] = field(default_factory=dict)
    samples: npt.NDArray[np.float32] | None = None  # [M, d]
    certified: bool = False


def cut_head(whole: ShardPart, parts: Sequence[OwnedRows]) -> list[ShardPart]:
    """The ``whole`` head in parts. Raises ValueError where tokens are missing or owned twice."""
    ids = np.sort(np.concatenate([owned.ids for owned in parts]))
    if not np.array_equal(ids, np.arange(whole.owned.vocabulary_size)):
        raise ValueError("shards of a head own every token of the vocabulary once")
    return [
        replace(
            whole,
            weight=whole.weight[torch.from_numpy(owned.ids).long()],
            bias=None if whole.bias is None else whole.bias[torch.from_numpy(owned.ids).long()],
            owned=owned,
        )
        for owned in parts
    ]


def build_shard(part: ShardPart) -> Shard:
    """The shard, with its screens timed here."""
    tiers: dict[str, Tier] = {
        name: quantize(part.weight, name, direction=part.directions.get(name))
        for name in part.tiers
    }
    shard = Shard(
        part.weight,
        part.bias,
        part.softcap,
        part.scale,
        part.owned.vocabulary_size,
        linear=partial(linear, weight=pack(part.weight)),
        ladder=Ladder(tiers, ((1, part.tiers[0]),)) if tiers else None,
        owned=part.owned,
    )
    if tiers and part.samples is not None:
        timings = calibrate(shard, (DENSE, *tiers), part.samples, part.largest)
        shard.start_with(*choose(timings, certified=part.certified))
    return shard
