"""A model's head in as many shards as its configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from actors.body.loading import LoadedModel
from actors.configuration import EngineConfiguration, TierName
from actors.head.owned_rows import OwnedRows
from actors.head.sharded.part import ShardPart, cut_head
from actors.head.sharded.recovering_head import RecoveringHead, ShardStarter
from actors.index.automatic import open_or_build
from actors.states.sequence_state import SequenceStates


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

    Raises ValueError for what has one shard only and where nobody can start them, and what
    assigning and starting them raises.
    """
    size = model.vocabulary_size
    if configuration.head == "paper":
        raise ValueError("the paper's head has one shard: leave --shards out, or --head paper")
    if model.body.device.type != "cpu":
        raise ValueError("shards in processes of their own are on CPUs: take --device cpu")
    if starter is None:
        raise ValueError("shards are started by the cluster layer: give shard_starter")
    samples: npt.NDArray[np.float32] | None = None
    directions: Mapping[TierName, npt.NDArray[np.float32]] = {}
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
    )
    return RecoveringHead(cut_head(whole, starter.assign(size)), starter, states)
