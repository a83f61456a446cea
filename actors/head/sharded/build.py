"""A model's head in as many shards as its configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import EngineConfiguration, TierName
from lexshard.actors.head.sharded.part import ShardPart, cut_head
from lexshard.actors.head.sharded.recovering_head import RecoveringHead, ShardStarter
from lexshard.actors.index.automatic import index_clusters, open_or_build
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.bounds import Clusters


def build_sharded(
    part: ShardPart,
    model: LoadedModel,
    tiers: Sequence[TierName],
    configuration: EngineConfiguration,
    states: SequenceStates,
    starter: ShardStarter | None,
) -> RecoveringHead:
    """The head of ``part``, every row of the model, in the shards of ``starter``.

    Raises ValueError where they cannot start and where clusters are missing, and what assigning
    and starting them raises.
    """
    if starter is None:
        raise ValueError("shards are started by the cluster layer: give shard_starter")
    if configuration.head == "paper":
        clusters = index_clusters(model, configuration)
        part = replace(part, clusters=cluster_of_rows(clusters))
    elif tiers:
        index = open_or_build(
            configuration.model, model, configuration.index, parts=["tiers"], tiers=tiers
        )
        common = {name: index.tiers[name].common for name in tiers}
        part = replace(
            part,
            tiers=tuple(tiers),
            directions={name: each.vector for name, each in common.items() if each is not None},
            samples=index.hidden,
            device=str(model.body.device),
        )
    return RecoveringHead(cut_head(part, starter.assign(model.vocabulary_size)), starter, states)


def cluster_of_rows(clusters: Clusters) -> npt.NDArray[np.int32]:
    """The cluster [V] of every row."""
    owner = np.empty(len(clusters.order), np.int32)
    owner[clusters.order] = np.repeat(np.arange(len(clusters.sizes)), clusters.sizes)
    return owner
