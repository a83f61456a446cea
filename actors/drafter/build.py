"""The drafter that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lexshard.actors.body.fused import FusedBody
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.actors.drafter.heads import frequency_head, full_head, routed_head
from lexshard.actors.drafter.loading import load_draft_model
from lexshard.actors.drafter.lookup import LookupDrafter
from lexshard.actors.drafter.model import ModelDrafter
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.router.file import FILE_NAME, read_router_file
from lexshard.actors.drafter.step_heads import WholeHead, certified_head
from lexshard.actors.drafter.stepwise import StepwiseDrafter
from lexshard.actors.index.format import describe_weights
from lexshard.kernels.draft import DraftHead

# What a static head holds of the vocabulary.
STATIC_SHARE = 0.2


def build_drafter(
    configuration: EngineConfiguration, *, blocks: int, vocabulary_size: int
) -> Drafter:
    """The drafter for a target of ``vocabulary_size`` tokens; a draft model gets a KV cache of
    ``blocks`` blocks.

    Raises what ``actors.drafter.loading.load_draft_model`` raises, and ValueError for a head that
    the draft model cannot have.
    """
    if configuration.draft is None or configuration.draft == NGRAM:
        return LookupDrafter()
    model = load_draft_model(configuration.draft, configuration.model, configuration.dtype)
    return drafter_of(model, configuration, blocks=blocks, vocabulary_size=vocabulary_size)


def drafter_of(
    model: LoadedModel, configuration: EngineConfiguration, *, blocks: int, vocabulary_size: int
) -> Drafter:
    """The drafter that a loaded draft model is, with the head that ``configuration`` asks for. As
    `build_drafter`."""
    wanted = configuration.draft_head
    size = min(model.vocabulary_size, model.body.vocabulary_size)
    if size < vocabulary_size:
        raise ValueError(
            f"the draft model has {size} of {vocabulary_size} tokens: use one that was made for "
            "the target's tokenizer"
        )
    if wanted == "certified":
        certified = certified_head(configuration, model, vocabulary_size)
        return StepwiseDrafter(model.body, certified, blocks=blocks)
    # Its kernel caps no logits.
    if isinstance(model.body, FusedBody) and not model.head.softcap:
        head = _draft_head(configuration, model, vocabulary_size)
        return ModelDrafter(model.body, head, blocks=blocks, vocabulary_size=vocabulary_size)
    if wanted not in ("auto", "full"):
        raise ValueError(
            f"{configuration.draft} drafts with its whole head or a certified one, for its family "
            "has no fused body, or soft-caps its logits: leave --draft-head out, or take certified"
        )
    whole = WholeHead(model.head, vocabulary_size)
    return StepwiseDrafter(model.body, whole, blocks=blocks)


def _draft_head(
    configuration: EngineConfiguration, model: LoadedModel, vocabulary_size: int
) -> DraftHead:
    """As ``configuration.draft_head`` says. A static list is of the tokens drawn most often, where
    a router file tells, else of those with the lowest ids: tokenizers learn frequent ones first.
    Where it tells, that is what "auto" takes: twice what the demo's router looks at."""
    weights, wanted = model.head.weight[: model.vocabulary_size], configuration.draft_head
    path = Path(str(configuration.draft)).expanduser() / FILE_NAME
    if wanted == "full" or (wanted == "auto" and not path.is_file()):
        return full_head(weights, vocabulary_size)
    if wanted == "static" and not path.is_file():
        frequent = np.arange(vocabulary_size, dtype=np.int32)
    else:
        file = read_router_file(path, describe_weights(weights, None))
        if wanted == "router":
            return routed_head(weights, file)
        frequent = file.frequent[file.frequent < vocabulary_size]
    count = max(1, round(STATIC_SHARE * vocabulary_size))
    return frequency_head(weights, frequent[:count], vocabulary_size)
