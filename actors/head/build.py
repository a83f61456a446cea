"""The output head of a loaded model: one shard with every row and the fastest screen here, or
several shards in as many processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import EngineConfiguration, TierName
from lexshard.actors.head.calibration import Calibrate, Timing, calibrate
from lexshard.actors.head.ladder import Choices
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.sharded.part import ShardPart, cut_head, timed_shard
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.bounds import Clusters
from lexshard.kernels.linear import fits_bfloat16
from lexshard.kernels.quantize import Tier

if TYPE_CHECKING:
    from lexshard.actors.head.sharded.recovering_head import ShardStarter

# A smaller head is read from the cache in no time: nothing to certify would be worth a file.
SMALLEST_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class BuiltHead:
    """A head, what it is in words, and what choosing it was based on."""

    head: SequenceHead
    description: str
    timings: tuple[Timing, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def build_head(
    model: LoadedModel,
    configuration: EngineConfiguration,
    states: SequenceStates,
    choose_threads: Callable[[OutputHead], None],
    shard_starter: ShardStarter | None = None,
    calibrate: Calibrate = calibrate,
) -> BuiltHead:
    """The head that ``configuration`` asks for, of sequences with these ``states``. A certified
    head is where the body is; the paper's and a dense one are on the CPU also where the body is on
    a GPU. Several shards are started by ``shard_starter``.

    ``choose_threads`` gets a head on the CPU as soon as it can decide: before its tiers are timed,
    which ``calibrate`` does.
    Loads the model's index or builds it (see `actors.index.automatic`), which runs the body and
    takes its cache. Raises what that raises, and ValueError where clusters are missing or shards
    cannot be had.
    """
    if configuration.shards > 1 and shard_starter is None:
        raise ValueError("shards are started by the cluster layer: give shard_starter")
    weight = model.head.weight.detach()[: model.vocabulary_size].cpu().contiguous()
    # Half the bytes, and the same products.
    weight = weight.bfloat16() if fits_bfloat16(weight) else weight
    bias = model.head.bias
    small = weight.numel() < SMALLEST_WEIGHTS
    choice = "dense" if configuration.head == "auto" and small else configuration.head
    part = ShardPart(
        weight=weight,
        bias=None if bias is None else bias.detach()[: model.vocabulary_size].cpu().float(),
        softcap=model.head.softcap,
        scale=model.head.scale,
        owned=OwnedRows.every(model.vocabulary_size),
        eos_ids=model.eos_token_ids,
        largest=configuration.max_running,
        certified=choice == "certified",
    )
    clusters: Clusters | None = None
    tiers: Mapping[str, Tier] = {}
    own: tuple[TierName, ...] = ()
    if choice != "dense":  # not needed, nor installed, everywhere
        from lexshard.actors.index.automatic import index_clusters, open_or_build

        if choice == "paper":
            clusters = index_clusters(model, configuration)
        else:
            folder, named = configuration.model, configuration.index
            home = model.body.device
            own = configuration.tiers_of(on_gpu=home.type != "cpu")
            index = open_or_build(folder, model, named, tiers=own)
            tiers = index.tiers
            part = replace(part, samples=index.hidden, device=str(home))
    if part.device != "cpu":
        drafted = 0 if configuration.draft is None else configuration.draft_tokens
        rows = configuration.max_running * (1 + drafted)
        part = replace(part, warm=min(rows, configuration.tokens_of_a_step("cuda")))
    if shard_starter is not None and configuration.shards > 1:
        # Needs msgspec, which is not everywhere.
        from lexshard.actors.head.sharded.recovering_head import RecoveringHead

        common = {name: tiers[name].common for name in own}
        whole = replace(
            part,
            tiers=own,
            directions={name: each.vector for name, each in common.items() if each is not None},
            clusters=None if clusters is None else _cluster_of_rows(clusters),
        )
        parts = cut_head(whole, shard_starter.assign(model.vocabulary_size))
        sharded = RecoveringHead(parts, shard_starter, states, model.body)
        if part.device == "cpu":
            choose_threads(sharded.head)
        name = "" if clusters is None else "paper (cluster bounds), "
        described = f"{name}{configuration.shards} shards, {configuration.shard_assignment}"
        if configuration.shards_at_ranks:
            described += ", at the ranks"
        return BuiltHead(sharded, described, device=sharded.device)
    if clusters is not None:
        head = PaperHead(
            weight, part.bias, part.softcap, part.scale, model.vocabulary_size, clusters
        )
        choose_threads(head)
        return BuiltHead(SequenceHead(head, states), "paper (cluster bounds)")
    where = ""
    if part.device != "cpu":
        where = ", on the GPU"
        there = model.head.weight.detach()
        # Where it is bfloat16 already, the body's own copy, which may be the embeddings, too.
        part = replace(part, weight=there if there.dtype == weight.dtype else weight)
    shard, timings, choices = timed_shard(part, tiers, choose_threads, calibrate)
    described = "dense" if choices is None else f"certified ({_words(*choices)}){where}"
    device = torch.device(part.device)
    return BuiltHead(SequenceHead(shard, states), described, tuple(timings), device)


def _cluster_of_rows(clusters: Clusters) -> npt.NDArray[np.int32]:
    """The cluster [V] of every row."""
    owner = np.empty(len(clusters.order), np.int32)
    owner[clusters.order] = np.repeat(np.arange(len(clusters.sizes)), clusters.sizes)
    return owner


def _words(choices: Choices, for_several: Choices) -> str:
    one, several = (
        ", ".join(name if rows == 1 else f"{name} from {rows} rows on" for rows, name in each)
        for each in (choices, for_several)
    )
    return one if several == one else f"{one}; for top-k {several}"
