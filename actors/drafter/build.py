"""The drafter and the rule of draft lengths that a configuration asks for."""

from __future__ import annotations

from actors.body.fused import FusedBody
from actors.configuration import NGRAM, EngineConfiguration
from actors.drafter.length import FixedLength, LengthRule, MeasuredLength, SteppingLength
from actors.drafter.loading import load_draft_model
from actors.drafter.lookup import LookupDrafter
from actors.drafter.model import ModelDrafter
from actors.drafter.protocol import Drafter
from actors.drafter.stepwise import StepwiseDrafter

# With what the papers' rule begins.
FIRST_LENGTH = 3


def build_drafter(
    configuration: EngineConfiguration, *, blocks: int, vocabulary_size: int
) -> Drafter:
    """The drafter for a target of ``vocabulary_size`` tokens, whose KV cache has ``blocks`` blocks:
    so many has a draft model's, too.

    Raises what ``actors.drafter.loading.load_draft_model`` raises, and ValueError for a head that
    the draft model does not have.
    """
    if configuration.draft is None or configuration.draft == NGRAM:
        return LookupDrafter()
    model = load_draft_model(configuration.draft, configuration.model, configuration.dtype)
    raise ValueError(model.body)


def length_rule(configuration: EngineConfiguration) -> LengthRule:
    """A new rule, which has learnt nothing."""
    most = configuration.draft_tokens
    if configuration.draft_length == "fixed":
        return FixedLength(most)
    if configuration.draft_length == "stepping":
        return SteppingLength(most, FIRST_LENGTH)
    return MeasuredLength(most)
