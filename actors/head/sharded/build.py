"""A model's head in as many shards as its configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import EngineConfiguration, TierName
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.part import ShardPart, cut_head
from lexshard.actors.head.sharded.recovering_head import RecoveringHead, ShardStarter
from lexshard.actors.index.automatic import index_clusters, open_or_build
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.bounds import Clusters


def build_sharded(
    model: LoadedModel,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiers: Sequence[TierName],
    configuration: EngineConfiguration,
    states: SequenceStates,
    starter: ShardStarter | None,
) -> RecoveringHead:
    """The head of output rows ``weight`` [V, d] in the shards of ``starter``.

    Raises ValueError where they cannot start and where clusters are missing, and what assigning
    and starting them raises.
    """
    size = model.vocabulary_size
    if starter is None:
        raise ValueError("shards are started by the cluster layer: give shard_starter")
    samples: npt.NDArray[np.float32] | None = None
    directions: Mapping[TierName, npt.NDArray[np.float32]] = {}
    clusters: npt.NDArray[np.int32] | None = None
    if configuration.head == "paper":
        clusters, tiers = cluster_of_rows(index_clusters(model, configuration)), ()
    if tiers:
        index = open_or_build(
            configuration.model, model, configuration.index, parts=["tiers"], tiers=tiers
        )
        samples = index.hidden
        common = {name: index.tiers[name].common for name in tiers}
        directions = {name: each.vector for name, each in common.items() if each is not None}
    whole = ShardPart(
        weight=weight,
        bias=bias,
        softcap=model.head.softcap,
        scale=model.head.scale,
        owned=OwnedRows.every(size),
        eos_ids=model.eos_token_ids,
        largest=configuration.max_running,
        tiers=tuple(tiers),
        directions=directions,
        samples=samples,
        certified=configuration.head == "certified",
        clusters=clusters,
        device=str(model.body.device) if tiers else "cpu",
    )
    return RecoveringHead(cut_head(whole, starter.assign(size)), starter, states)


def cluster_of_rows(clusters: Clusters) -> npt.NDArray[np.int32]:
    """The cluster [V] of every row."""
    owner = np.empty(len(clusters.order), np.int32)
    owner[clusters.order] = np.repeat(np.arange(len(clusters.sizes)), clusters.sizes)
    return owner
