"""Stop strings end a reply where its text is made, not where tokens are drawn."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass

from lexshard.actors.text.detokenizer import Detokenizer
from lexshard.actors.text.token_bytes import TokenBytes

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MOST_SHOWN = 64


@dataclass(frozen=True, slots=True)
class StopRule:
    """``strings`` end a reply. ``include``: also those in the token that the model ended with.

    Special tokens have no text unless they are ``special_shown``, all of them, or among
    ``shown_ids``: the marks that tell reasoning and calls of tools from the rest.
    """

    strings: tuple[str, ...]
    include: bool
    special_shown: bool
    shown_ids: tuple[int, ...] = ()

    def wrong(self) -> str | None:
        """What no request could have asked for; None where there is nothing."""
        if not 1 <= len(self.strings) <= MAX_STOP_STRINGS:
            return f"there are {len(self.strings)}"
        if not all(1 <= len(each) <= MAX_STOP_LENGTH for each in self.strings):
            return "one is empty or too long"
        if len(self.shown_ids) > MOST_SHOWN or (self.special_shown and self.shown_ids):
            return "its shown ids"
        return None


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a model's tokens are spelled: all of them, and without the special ones."""

    every: TokenBytes
    visible: TokenBytes

    def detokenizer(self, rule: StopRule, min_tokens: int) -> Detokenizer:
        """What finds the stop strings of a reply whose first tokens may complete none."""
        tokens: Mapping[int, bytes] = self.every
        if not rule.special_shown:
            shown = {token_id: self.every[token_id] for token_id in rule.shown_ids}
            tokens = ChainMap(shown, self.visible)
        return Detokenizer(tokens, rule.strings, rule.include, min_tokens)
