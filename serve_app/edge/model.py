"""The draft model of a device, by itself."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.utils.logging import disable_progress_bar

from lexshard.actors.configuration import DraftHeadChoice, EngineConfiguration, EngineInformation
from lexshard.actors.drafter.build import drafter_of
from lexshard.actors.drafter.loading import load_draft_model
from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.serve_app.openai.tokenization import ModelTokenizer

TEXTS = 8  # of full length, that its cache holds at once
MOST_BLOCKS = 16_384


@dataclass(frozen=True, slots=True)
class EdgeModel:
    """What drafts, what it reads, and what an engine of it alone would say of itself."""

    drafter: GuessingModel
    tokenizer: ModelTokenizer
    information: EngineInformation


def load_model(folder: str, head: DraftHeadChoice = "auto") -> EdgeModel:
    """The draft model in ``folder``. Raises what ``actors.drafter.loading.load_draft_model``
    raises."""
    disable_progress_bar()
    configuration = EngineConfiguration(model=folder, draft=folder, draft_head=head)
    model = load_draft_model(folder, folder)
    size = model.vocabulary_size
    blocks = min(MOST_BLOCKS, -(-model.max_positions // BLOCK_TOKENS) * TEXTS)
    drafter = drafter_of(model, configuration, blocks=blocks, vocabulary_size=size)
    information = EngineInformation(
        model=folder,
        dtype=model.dtype,
        device="cpu",
        body="draft model alone",
        head=head,
        batch_invariant=True,
        threads=1,
        max_model_len=model.max_positions,
        vocabulary_size=size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=dict(model.default_sampling),
        kv_blocks=blocks,
        kv_tokens=blocks * BLOCK_TOKENS,
        kv_bytes=0,
        parameters=model.parameters,
        process_id=0,
    )
    return EdgeModel(drafter, ModelTokenizer.load(folder), information)
