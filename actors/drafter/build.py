"""The drafter and the rule of draft lengths that a configuration asks for."""

from __future__ import annotations

from actors.configuration import NGRAM, EngineConfiguration
from actors.drafter.length import FixedLength, LengthRule, MeasuredLength, SteppingLength
from actors.drafter.lookup import LookupDrafter
from actors.drafter.protocol import Drafter

# With what the papers' rule begins.
FIRST_LENGTH = 3


def build_drafter(configuration: EngineConfiguration) -> Drafter:
    """Raises ValueError for a draft that cannot be used."""
    if configuration.draft == NGRAM:
        return LookupDrafter()
    raise ValueError(f"no drafter for {configuration.draft}")


def length_rule(configuration: EngineConfiguration) -> LengthRule:
    """A new rule, which has learnt nothing."""
    most = configuration.draft_tokens
    if configuration.draft_length == "fixed":
        return FixedLength(most)
    if configuration.draft_length == "stepping":
        return SteppingLength(most, FIRST_LENGTH)
    return MeasuredLength(most)
