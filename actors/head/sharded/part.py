"""One shard's part of a model's head: all that a process must know to be that shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.configuration import GPU_TIER, TierName
from lexshard.actors.head.calibration import Calibrate, Timing, calibrate, choose
from lexshard.actors.head.ladder import Choices, Ladder
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.owned_rows import OwnedRows, check_complete
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.screens import DENSE
from lexshard.actors.head.shard import Shard
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.bounds import summarise
from lexshard.kernels.linear import pack
from lexshard.kernels.quantize import Int8Tier, Tier, quantize

if TYPE_CHECKING:
    from lexshard.actors.head.gpu.device_shard import DeviceShard


@dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """The ``owned`` rows of a head, and how to find tokens among them.

    They are screened with the fastest of ``tiers``, which are made and timed where the shard is, on
    ``samples`` of hidden states, in steps of up to ``largest`` rows; the dense screen competes
    where it is not ``certified``. ``directions`` are those that the hidden states have in common,
    for tiers that are better with one (`kernels.quantize`). Without tiers every screen is dense.
    Rows with ``clusters`` are of the paper's head. On a ``device`` there must be int8.
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
    clusters: npt.NDArray[np.int32] | None = None  # [n] of the paper's head: each row's cluster
    device: str = "cpu"
    warm: int = 0  # rows of the largest step to prepare a device for, where these are more


def cut_head(whole: ShardPart, parts: Sequence[OwnedRows]) -> list[ShardPart]:
    """The ``whole`` head in parts. Raises ValueError where tokens are missing or owned twice."""
    check_complete([owned.ids for owned in parts], whole.owned.vocabulary_size)
    return [
        replace(
            whole,
            weight=whole.weight[torch.from_numpy(owned.ids).long()],
            bias=None if whole.bias is None else whole.bias[torch.from_numpy(owned.ids).long()],
            owned=owned,
            clusters=None if whole.clusters is None else whole.clusters[owned.ids],
        )
        for owned in parts
    ]


def build_shard(part: ShardPart) -> Shard | DeviceShard | PaperHead:
    """The shard, with its screens timed here.

    Raises ValueError where it is to be on a GPU and this process has none.
    """
    if part.clusters is not None:
        return _of_clusters(part, part.clusters)
    return build_ladder(part)


def build_ladder(part: ShardPart) -> Shard | DeviceShard:
    """The shard of a part without clusters. Raises as `build_shard`."""
    tiers: dict[str, Tier] = {
        name: quantize(part.weight, name, direction=part.directions.get(name))
        for name in part.tiers
    }
    return timed_shard(part, tiers).shard


class BuiltShard(NamedTuple):
    """A shard, what its screens took, and which of them steps start with (see `choose`)."""

    shard: Shard | DeviceShard
    timings: Sequence[Timing] = ()
    choices: tuple[Choices, Choices] | None = None


def timed_shard(
    part: ShardPart,
    tiers: Mapping[str, Tier],
    ready: Callable[[OutputHead], None] = lambda shard: None,
    calibrate: Calibrate = calibrate,
) -> BuiltShard:
    """The shard of a part with these ``tiers``, the fastest of which on a CPU ``calibrate`` finds;
    ``ready`` gets one there as soon as it can decide. Raises as `build_shard`."""
    head = part.weight, part.bias, part.softcap, part.scale, part.owned.vocabulary_size
    if part.device == "cpu":
        ladder = Ladder(tiers, ((1, next(iter(tiers))),)) if tiers else None
        # The row kernel is the dense screen: half the bytes of fp32 for bf16 weights, and four to
        # six times as fast as torch at one row.
        shard = Shard(*head, linear=pack(part.weight), ladder=ladder, owned=part.owned)
        ready(shard)
        if ladder is None or part.samples is None:
            return BuiltShard(shard)
        timings = calibrate(shard, (DENSE, *tiers), part.samples, part.largest)
        choices = choose(timings, certified=part.certified)
        shard.start_with(*choices)
        return BuiltShard(shard, timings, choices)
    from lexshard.actors.head.gpu.device_shard import DeviceShard  # needs Triton

    if part.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("a shard of a head on GPUs has none: reserve one for it, or --device cpu")
    tier = tiers[GPU_TIER]
    assert isinstance(tier, Int8Tier)
    there = DeviceShard(*head, tier, device=part.device, owned=part.owned)
    there.warm_up(part.warm or part.largest)
    choice = ((1, GPU_TIER),)
    return BuiltShard(there, choices=(choice, choice))


def _of_clusters(part: ShardPart, cluster_of: npt.NDArray[np.int32]) -> PaperHead:
    """Clusters of which this shard has a part are bounded by the rows it has."""
    sizes = np.unique(cluster_of, return_counts=True)[1]
    order = np.argsort(cluster_of, kind="stable").astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    clusters = summarise(part.weight, part.bias, order, offsets)
    size = part.owned.vocabulary_size
    shard = PaperHead(
        part.weight, part.bias, part.softcap, part.scale, size, clusters, owned=part.owned
    )
    # A step has a time-out, which compiling must not use up.
    hidden = np.zeros((1, part.weight.shape[1]), np.float32)
    screening = shard.bound(hidden, RowTable.of([Need("top1", inverse_temperature=1.0)]))
    shard.logits(screening, [0], [part.owned.ids[:1]])
    return shard
